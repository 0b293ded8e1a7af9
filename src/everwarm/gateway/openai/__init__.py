"""OpenAI's chat completions and completions. Its bodies are what every other dialect is translated to.

``schema`` has ``ChatBody`` and ``CompletionBody``, with the extensions of llama-server and our own: typed, bounded,
unknown fields ignored; ``defaults`` is what holds where a body does not say it. ``routes`` answers both,
streamed or whole. ``encode`` writes choices, chunks, usage and timings, and why tokens were read. ``stored_chats`` lists,
changes and deletes completions that were stored.
"""
