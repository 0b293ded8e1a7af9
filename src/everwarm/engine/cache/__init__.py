"""What the engine keeps of prompts while it runs: checkpoints taken, restored, thinned, copied to RAM, dropped.

``checkpointing`` takes and copies them and makes room; ``restore`` brings a slot to the deepest known point of a
prompt; ``offload`` copies a running turn to RAM before its reply ends; ``prewarm`` reads the next turn in idle
time; ``compaction`` joins small KV segments; ``drop`` forgets on request. ``provenance`` says whether kept parts
come from one clean reading.
"""
