"""The memory of prefixes: tree, policy, and where bytes live. Knows tokens and bytes; knows no libllama."""
