"""Vectors and ranks instead of text, for every API that has them: OpenAI, llama-server, Ollama, Jina, TEI.

``schema`` has the bodies, ``routes`` asks the engine of an embedding model, ``encode`` scales, cuts and writes the answers.
"""
