"""Ollama's API: its bodies in, lines of JSON out.

``schema`` parses chat and generate into types and translates them to OpenAI's ``ChatBody`` or ``CompletionBody``.
``routes`` answers these and the questions about models. ``pull`` downloads and deletes models, where that is allowed;
``derived_models`` are made of others. ``encode`` writes a reply as a line for each piece, or as one. ``model_list``
describes models from the headers of their files.
"""
