"""Bytes that outlive the engine: the RAM arena, object files on disk and their index.

``object`` is the file format, verified by digests wherever it is read; ``files`` the durable file operations; ``disk`` the
tier, with an ``index`` that only remembers what the files say, and a file of pins. ``object_table`` is what the tier knows
of its files, ``disk_eviction`` which state is evicted next, ``background_pass`` the thread that reads all headers.
``folder_meta`` says which model a folder belongs to. ``arena`` is memory that survives the engine (``arena_file`` its
layout). ``slot_file`` is llama.cpp's format with our companion, ``slot_names`` the names that such files may have.
"""
