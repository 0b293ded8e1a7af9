"""Replaying traces against placement and eviction policies. Knows state and prompt; knows no model and no libllama."""
