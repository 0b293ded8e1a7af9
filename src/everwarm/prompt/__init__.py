"""Items, their two counters, and tokenizing. The only room that converts token counts to positions."""
