"""The engine process: the only folder that sees both libllama and the prefix tree. Knows no HTTP.

``process`` reads frames and answers them. ``loop`` runs a thread around ``core``, whose ``step`` admits
(``scheduling``), restores (``cache``), decodes, picks tokens and keeps checkpoints. ``tiers`` carries what is kept
to RAM, disk and the remote store and back. ``inspect`` shows it, ``slotfile`` saves and loads slots, ``verify``
proves it bit for bit. ``build`` puts the parts together; ``slots`` owns the slots and spares and alone fills and
empties them; ``recovery`` decides what becomes of requests when a step does not fit or fails; ``images`` encodes
images and puts them into prompts.
"""
