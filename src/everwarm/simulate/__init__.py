"""Placement and eviction policies against traces, without a model: requests in, tokens read and seconds out.

``trace`` reads the requests. ``policies`` has the engine's policy and those of other servers; ``simulated_cache`` runs
one on the real tree under a budget, on a ``simulated_machine``: what a model costs there, its device and its disk;
``fifo_cache`` does what llama-server does, and ``oracle`` knows what no policy can avoid. ``replay`` sums the costs,
``plot`` draws them. ``fleet`` simulates many replicas and the router between them. Knows state and prompt; knows no
model and no libllama.
"""
