"""Which request may do what in the next step: waiting and running requests in, grants out.

``admission``: who waits, who starts next, may it start now, and how much work is ahead of a new one? A deterministic
request runs alone, in turns with the others. ``scheduler``: which decodes how many tokens, and which makes room? It is
pure, and its rule keeps every request moving; requests with other scales of LoRA adapters
decode in steps of their own.
"""
