"""The engine process: the only folder that sees both libllama and the prefix tree. Knows no HTTP.

``process`` reads frames and answers them. ``loop`` runs a thread around ``core``, whose ``step`` admits
(``scheduling``), starts and ends requests (``lifecycle``), restores (``cache``), decodes, picks tokens
(``speculation`` drafts some) and keeps checkpoints. ``tiers`` carries what is kept to RAM, disk and the remote store
and back. ``inspect`` shows it, ``slotfile`` saves and loads slots, ``verify`` replays it cold and compares.
``engine`` is the whole as a library, ``request`` the record of one; ``settings`` and ``fingerprint`` say what states
depend on, ``memory_plan`` what fits, ``stats`` what was counted and how fast it is. ``build`` puts the parts
together; ``slots`` owns the slots and spares: it alone empties them and records what they hold, and ``cache.restore``
fills them; ``images`` encodes images and puts them into prompts.
"""
