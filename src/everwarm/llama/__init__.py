"""The C boundary: the only ctypes in the project. Knows pointers, blobs and return codes; knows no prefix tree."""
