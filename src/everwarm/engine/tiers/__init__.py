"""Moves checkpoints and KV out of the engine and back: RAM arena, disk, remote store.

``ram`` binds tree and arena. ``packing`` turns a point of the tree into objects. ``open_tiers`` opens disk and remote
store, and tries a degraded disk again; ``lower_tiers`` is both as one, with the thread that writes them. ``tier_writer``
decides what of a finished turn is written, and what of it other servers can use; ``loader`` reads and verifies objects on
other threads and adds them to the tree; ``arriving`` is what is still being read out of a slot file. ``disk_pins`` keeps
pins across restarts, ``pinned_arena`` pins memory for the GPU. A tier that is off finds and keeps nothing (``state.tier``).
"""
