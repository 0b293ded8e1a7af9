"""The server process: HTTP in, frames to the engine out, and back. Knows text and JSON; never loads libllama.

A request's way: ``http`` (socket, bounded body) → ``access`` (key, role, limits) → a dialect (``openai``,
``responses``, ``anthropic``, ``ollama``, ``llamaserver``: schema and routes) → ``chat`` (messages become a prompt)
with ``constraints`` and ``images`` → ``service`` (the engine is asked) → ``parsing`` (text becomes reasoning and
tool calls) → the dialect's encoder → ``http.sse``. ``admin`` shows and steers the server; ``explain`` says why a
prompt was read.
"""
