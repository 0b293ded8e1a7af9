"""Moves checkpoints and KV out of the engine and back: RAM arena, disk, remote store.

``ram`` binds tree and arena. ``packing`` turns a point of the tree into objects. ``lower_tiers`` is disk and remote
store as one, with the thread that opens and writes them. ``tier_writer`` decides what of a finished turn is written,
and what of it other servers can use; ``loader`` reads and verifies objects on other threads and adds them to the tree.
``disk_texts`` reads texts for drafts, ``disk_pins`` keeps pins across restarts, ``pinned_arena`` pins memory for the
GPU, ``model_folder`` writes what a folder says of its model. A tier that is off is a null tier (``state.null_tiers``).
"""
