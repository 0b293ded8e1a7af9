"""Constrained decoding with llguidance: a ``Constraint`` in, the tokens that may come next out.

``trial`` has a constraint tried in a child process first, because some take minutes, gigabytes or more stack than there
is; ``trial_worker`` is that child, and writes the constraint as one grammar. ``matcher`` compiles what passed, once, and
follows each reply through it, token by token. llguidance is loaded with the first constraint.
"""
