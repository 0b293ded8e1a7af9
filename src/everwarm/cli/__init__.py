"""The command line: flags, environment and a TOML file in; one function called, its result printed.

``app`` has the program, ``serve`` and the short commands; ``flags`` the flags of ``serve`` and the settings they become;
``config_file`` checks and prints files of settings, ``help_page`` writes ``--help``. The other modules have one command
each: ``backend`` (builds of libllama), ``cache`` (what is kept, and orders, with ``cache_output`` for what it prints),
``chat``, ``explain``, ``simulate``, ``tiny`` and ``top``; ``models`` has those that take a model's name (``pull``,
``list``, ``rm``, ``ps``, ``run``, ``stop``). Every command ends in a call of another folder; nothing is decided here.
Commands that need libllama or a model import it when they run, so that ``--help`` is quick.
"""
