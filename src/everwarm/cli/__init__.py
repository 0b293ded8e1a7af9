"""The command line, one module per command: parse, make frozen settings, call one function.

``app`` has the short commands, ``serve_options`` the flags of ``serve``. Commands that need libllama or a
model import it when they run, so that ``--help`` is quick.
"""
