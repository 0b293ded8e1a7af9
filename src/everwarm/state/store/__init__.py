"""Bytes that outlive the engine: the RAM arena, object files on disk and their index.

``object`` is the file format, verified by digests wherever it is read; ``files`` the durable file operations; ``disk`` the
tier, with a file of pins and a thread that reads all headers; ``index`` is what it knows of its files, in SQLite and in
memory, and ``disk_eviction`` says which state is evicted next.
``folder_meta`` says which model a folder belongs to. ``arena`` is memory that survives the engine (``arena_file`` its
layout). ``slot_file`` is llama.cpp's format with our companion, ``slot_names`` the names that such files may have.
"""
