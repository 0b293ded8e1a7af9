"""Builds of libllama for this machine: made from the pinned source, kept in the user's data folder, found by engines.

``installed`` knows which builds there are and which one is used; ``source_archive`` fetches and checks the source;
``compiling`` turns it into libraries; ``gpus`` tells which GPUs the machine has. Nothing here loads libllama.
"""
