"""What the engine reports about itself: the cache tree page by page, what is only on disk, counts, and why a request
was read.

Reads only, but for ``cache_commands``, which carries out orders to pin and drop.
"""
