"""The way of checkpoints and KV out of the engine and back: RAM arena, disk, remote store.

``ram`` binds tree and arena. ``packing`` turns a point of the tree into objects; ``disk_writer`` and
``remote_writer`` write them; ``loader`` reads and verifies them on other threads and hangs them into the tree.
``disk_pins`` keeps pins across restarts, ``pinned_arena`` pins memory for the GPU, ``model_folder`` writes what a
folder says of its model.
"""
