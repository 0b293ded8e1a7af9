"""What the engine keeps of prompts while it runs: checkpoints taken, restored, thinned, copied to RAM, dropped.

``checkpointing`` takes checkpoints and drops them; ``ram_writer`` copies states and KV to RAM; ``ram_budget`` decides
with ``state.ram_eviction`` what RAM evicts, and drops it. ``device_room`` makes room on the device: it saves what
slots and spares hold, then has them emptied. ``restore`` brings a slot to the deepest known point of a prompt.
``offload`` copies a turn to RAM while its reply is written, and holds the reply's last frame until the turn is safe
there or on disk; ``prewarm`` reads the next turn in idle time; ``compaction`` joins small KV segments. ``provenance``
says whether kept parts come from one clean reading, and which points other conversations may continue from.
``prefix_cache`` is all of them as one thing, and forgets on request.
"""
