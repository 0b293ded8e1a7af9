"""Builds of libllama for this machine: made from the pinned source, kept in the user's data folder, found by engines.

``installed`` knows which builds there are, which one is used, and which GPUs the machine has for them; ``source_archive``
fetches and checks the source; ``compiling`` finds compilers and the like, or installs them, and turns the source into
libraries. Nothing here loads libllama."""
