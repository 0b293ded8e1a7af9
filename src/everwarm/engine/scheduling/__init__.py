"""Which request may do what in the next step. Decisions are pure.

``admission``: may a waiting request start? ``scheduler``: which decodes how many tokens, and which makes room?
``turns``: a deterministic request runs alone, in turns with the others. ``backlog``: how much work is ahead.
"""
