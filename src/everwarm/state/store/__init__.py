"""Bytes that outlive the engine: the RAM arena, object files on disk and their index.

``object`` is the file format, verified by digests; ``files`` the durable file operations; ``disk`` the tier, with
an ``index`` that only remembers what the files say, an ``object_table`` in memory and ``disk_eviction`` for what
must go. ``arena`` is memory that survives the engine. ``slot_file`` is llama.cpp's format with our companion.
"""
