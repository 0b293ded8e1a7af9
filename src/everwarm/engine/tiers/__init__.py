"""Moves checkpoints and KV out of the engine and back: RAM arena, disk, remote store.

``ram`` binds tree and arena, and pins the arena's memory for the GPU. ``packing`` turns a point of the tree into
objects. ``lower_tiers`` is disk and remote store as one, with the thread that opens and writes them and tries a
degraded disk again. ``tier_writer`` decides what of a finished turn is written, and what of it other servers can use;
``loader`` reads objects on other threads, compares what they say of themselves with the prompt and the model, and
adds them to the tree; their digests are checked by ``state.store.object`` as it reads. ``pins`` keeps pins across
restarts, and ends others in time. A tier that is off finds and keeps nothing (``state.tier``).
"""
