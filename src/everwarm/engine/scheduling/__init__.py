"""Which request may do what in the next step: waiting and running requests in, grants out. Decisions are pure.

``admission``: who starts next, may it start now, and how much work is ahead of a new one? ``scheduler``: which decodes how
many tokens, and which makes room? Its rule keeps every request moving. ``turns``: a deterministic request runs alone, in
turns with the others. ``adapter_turns``: requests with other scales of LoRA adapters decode in steps of their own.
"""
