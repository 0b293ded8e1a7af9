"""Proof that what is kept is what a cold reading gives: replays lineages in a context of their own and compares bytes."""
