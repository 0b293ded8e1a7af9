"""Placement and eviction policies against traces, without a model: requests in, tokens read and seconds out.

``trace`` reads the requests, ``curves`` says what a model costs. ``policies`` has the engine's policy and those of other
servers; ``simulated_cache`` runs one on the real tree under a budget, with a ``simulated_device`` above it, a
``simulated_disk`` below it and blobs that are ``weightless``; ``fifo_cache`` does what llama-server does, and ``oracle``
knows what no policy can avoid. ``replay`` sums the costs, ``plot`` draws them. ``fleet`` simulates many replicas and the
router between them. Knows state and prompt; knows no model and no libllama.
"""
