"""Flags of ``serve`` beside its main ones, which are in ``serve_options``.

``option_groups`` has the headings of ``--help``. ``placement_options`` says where weights lie and how positions are
encoded, ``request_options`` the defaults of requests that do not set a field. ``llama_flags`` is llama-server's command
line as a table, and ``llama_line`` turns such a command line, and llama-server's variables, into our flags;
``named_templates`` has the chat templates that it knows by name.
"""
