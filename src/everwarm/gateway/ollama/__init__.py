"""Ollama's API: its bodies in, lines of JSON out.

``schema`` parses chat and generate into types and translates them to OpenAI's ``ChatBody`` or ``CompletionBody``.
``routes`` answers these and the questions about models. ``models`` describes models from the headers of their files, makes
some of others, and downloads and deletes them where that is allowed. ``encode`` writes a reply as a line for each piece, or
as one.
"""
