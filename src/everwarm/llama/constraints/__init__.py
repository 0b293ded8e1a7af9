"""Constrained decoding with llguidance: ``trial`` and its child ``trial_worker`` try a constraint, ``grammar`` writes it as
one grammar, ``matcher`` compiles it and follows a reply through it."""
