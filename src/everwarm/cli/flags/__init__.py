"""The flags of ``serve``.

``serve_options`` has them, and the settings they become. ``llama_flags`` is llama-server's command line as a table, and
turns such a command line, and llama-server's variables, into our flags; ``named_templates`` has the chat templates that it
knows by name.
"""
