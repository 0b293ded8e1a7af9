"""Everwarm: an inference server for hybrid and recurrent language models that never reads a prompt twice.

The folders are the parts of it; the modules here are what all of them use. ``config`` checks settings, ``errors`` has every
error with its HTTP status, ``types`` the types without behaviour, ``logs`` the form of log lines, and ``lru`` a bounded
cache that keeps namespaces apart. ``memory_limits`` asks what this process may take, ``confined_process`` bounds a child
that decodes files, and ``sound_files`` tells which files are sounds.
"""

__version__ = "0.1.0"
