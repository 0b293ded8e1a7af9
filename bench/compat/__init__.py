"""Beside llama-server: the same prompts, and the same test suite."""
