"""Engines as processes, and several models behind one address. Knows frames; knows no HTTP and no libllama.

A request asks ``pool`` for a model and gets a lease; the pool finds the model in ``catalog``, and has it loaded if it is
not in memory. ``plan`` decides, purely, which models are in memory and whose turn it is; the pool carries that out.
``supervise`` runs one model's engine process, restarts it when it dies, and sends it the requests that waited.
``replica_score`` chooses between replicas on many machines, for ``ray`` and the simulator.
"""
