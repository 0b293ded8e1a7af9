"""Proof that what is kept is what a cold reading gives, bit for bit.

``cold_replay`` reads a lineage again in a context of its own, in the same chunks as it was read before. ``verify_states``
loads states and their KV from disk, replays their lineages, and compares bytes, or logits where bits cannot be equal.
``everwarm cache verify`` prints what it found.
"""
