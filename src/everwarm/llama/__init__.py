"""The C boundary: the only ctypes in the project. Knows pointers, blobs and return codes; knows no prefix tree."""

if not __debug__:
    raise ImportError("Everwarm must not run with python -O: its assertions keep bad calls away from libllama")
