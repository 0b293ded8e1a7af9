"""The prefix cache as data: which prefixes are known, where their bytes are, what is worth keeping. Knows no libllama.

``tree`` is the prefix tree with checkpoints and KV segments, and the ghosts of what was evicted; ``policy`` decides
where to cut and what to thin, and has the rule of eviction. ``ram_eviction`` says what everything in RAM is worth, by
what ``returns`` learns of what comes back and where prompts part; ``store.disk_eviction`` does so for the disk, by
lineages, hits and age. ``segment_merge`` says which segments become one; ``lineage`` names prefixes and namespaces, and
records how they were decoded. ``tier`` is what disk and remote store have in common, and what they are while they are
off; ``disk_tree`` shows what is only on disk as a tree. ``store`` has the bytes in memory and on disk, ``remote`` those
shared between servers, ``tools`` what ``everwarm cache`` does with a folder.
"""
