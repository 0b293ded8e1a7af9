"""Moves checkpoints and KV out of the engine and back: RAM arena, disk, remote store.

``ram`` binds tree and arena. ``packing`` turns a point of the tree into objects; ``tier_writer`` decides what of a
finished turn is written, and writes it to disk; ``remote_writer`` offers other servers what they can use; ``loader``
reads and verifies objects on other threads and adds them to the tree. ``disk_pins`` keeps pins across restarts,
``pinned_arena`` pins memory for the GPU, ``model_folder`` writes what a folder says of its model. A tier that is off is
a null tier (``state.null_tiers``).
"""
