"""Builds of libllama for this machine: made from the pinned source, kept in the user's data folder, found by engines.

``installed`` knows which builds there are and which one is used; ``source_archive`` fetches and checks the source;
``build_tools`` finds compilers and the like, or installs them; ``compiling`` turns the source into libraries; ``gpus``
tells which GPUs the machine has. Nothing here loads libllama.
"""
