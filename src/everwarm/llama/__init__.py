"""The C boundary: the only ctypes in the project. Knows pointers, blobs and return codes; knows no prefix tree.

``lib`` finds and loads libllama, ``abi`` declares it. ``model``, ``context``, ``sequences``, ``sampler`` and
``vocab`` are its objects with Python's manners: every refusal is an error, every handle closes itself. ``embedder`` has a
model that makes vectors.
``cells`` counts KV cells; ``blobs`` checks state blobs before libllama sees them; ``kv_splice`` joins and cuts KV
in them, ``state_types`` packs states into fewer bytes. ``mtp`` is a model's own head, ``media`` libmtmd, ``constraints``
llguidance, ``system`` the process, its memory and its files.
"""

if not __debug__:
    raise ImportError("Everwarm must not run with python -O: its assertions keep bad calls away from libllama")
