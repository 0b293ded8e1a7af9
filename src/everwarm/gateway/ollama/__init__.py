"""Ollama's chat and generate: request schema, routes, lines of JSON, and its list of models."""
