"""OpenAI's chat completions and completions. Its bodies are what every other dialect is translated to.

``schema`` has ``ChatBody`` and ``CompletionBody``, with the extensions of llama-server and our own: typed, bounded,
unknown fields ignored; and the server's defaults for what a body does not say. ``routes`` answers both, streamed or whole,
and lists, changes and deletes chats that were stored. ``encode`` writes choices, chunks, usage and timings, and why tokens
were read.
"""
