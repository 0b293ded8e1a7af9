"""The prefix cache as data: which prefixes are known, where their bytes are, what is worth keeping. Knows no libllama.

``tree`` is the prefix tree with checkpoints and KV segments; ``policy`` decides where to cut, what to thin and what to
evict; ``returns`` learns what comes back, and ``eviction`` weighs everything in RAM by it (on disk,
``store.eviction_order`` counts hits and age); ``segment_merge`` says which segments become one; ``partings`` learns
before which words prompts part; ``lineage`` names prefixes and records how they were decoded, ``namespace`` whose they
are; ``ghosts`` remembers what was evicted. ``tier`` is what disk and remote store have in common, ``null_tiers`` what
stands in for one that is off, ``disk_tree`` shows what is only on disk as a tree. ``store`` has the bytes in memory and
on disk, ``remote`` those shared between servers, ``tools`` what ``everwarm cache`` does with a folder.
"""
