"""Items, their two counters, and tokenizing. The only folder that converts token counts to positions."""
