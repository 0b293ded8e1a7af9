"""The prefix cache as data: which prefixes are known, where their bytes are, what is worth keeping. Knows no libllama.

``tree`` is the prefix tree with checkpoints and KV segments; ``policy`` decides where to cut and what to thin, and has
the rule of eviction. ``ram_eviction`` says what everything in RAM is worth, by what ``returns`` learns of what comes
back; ``store.disk_eviction`` does so for the disk, by hits and age. ``segment_merge`` says which segments become one;
``partings`` learns before which words prompts part; ``lineage`` names prefixes and records how they were decoded,
``namespace`` whose they are; ``ghosts`` remembers what was evicted. ``tier`` is what disk and remote store have in
common, ``null_tiers`` what stands in for one that is off, ``disk_tree`` shows what is only on disk as a tree. ``store``
has the bytes in memory and on disk, ``remote`` those shared between servers, ``tools`` what ``everwarm cache`` does
with a folder.
"""
