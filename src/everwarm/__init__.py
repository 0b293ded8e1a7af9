"""Everwarm: an inference server for hybrid and recurrent language models that never reads a prompt twice."""

__version__ = "0.1.0"
