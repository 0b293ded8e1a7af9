"""The C boundary: the only ctypes in the project. Knows pointers, blobs and return codes; knows no prefix tree.

``lib`` finds and loads libllama and lists its devices, ``abi`` declares it. ``model``, ``context``, ``sampler`` and
``vocab`` are its objects with Python's manners: every refusal is an error, every handle closes itself. ``batch`` is what
one decode gets; ``cells`` counts KV cells; ``blobs`` checks state blobs before libllama sees them, joins and cuts KV in
them, and packs states into fewer bytes. ``mtp_head`` is a model's own head, which guesses the token after the next one;
``embedder`` has a model that makes vectors. ``media`` is libmtmd, ``constraints`` llguidance, ``system`` the process, its
memory and its files.
"""

if not __debug__:
    raise ImportError("Everwarm must not run with python -O: its assertions keep bad calls away from libllama")
