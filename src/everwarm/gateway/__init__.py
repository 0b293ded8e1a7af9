"""The server process: HTTP in, frames to the engine out, and back. Knows text and JSON; never loads libllama.

A request's way: ``http`` (socket, bounded body) → ``access`` (key, role, limits) → a dialect (``openai``,
``responses``, ``anthropic``, ``ollama``, ``llamaserver``: schema and routes) → ``serving`` (admission, preparation, the
engine, the one stream loop), with ``chat`` (messages become a prompt, pure), ``constraints`` and ``images`` →
``parsing`` (text becomes reasoning and tool calls) → the dialect's encoder → ``http.sse``. ``rewrite`` changes lines
of system text that clients change without need, ``admin`` shows and steers the server. ``embeddings`` answers with
vectors; ``explain`` says why a prompt was read again. ``app`` builds all of it from ``settings``, ``server`` runs it
with uvicorn, and ``client`` is how the command line talks to a running server. ``stores`` keeps responses, chat completions
and remembered replies in SQLite, each namespace apart, and evicts the least recently used.
"""
