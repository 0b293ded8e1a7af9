"""Everything the demonstration needs that a real deployment does not: tiny models and scripted clients."""
