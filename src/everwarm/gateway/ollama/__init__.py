"""Ollama's API: its bodies in, lines of JSON out.

``schema`` parses chat and generate into types and translates them to OpenAI's ``ChatBody`` or ``CompletionBody``.
``routes`` answers these and the questions about models. ``models`` describes models from the headers of their files, and
makes some of others. ``encode`` writes a reply as a line for each piece, or as one.
"""
