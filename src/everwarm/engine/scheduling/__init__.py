"""Which request may do what in the next step: waiting and running requests in, grants out. Decisions are pure.

``admission``: may a waiting request start? It needs a slot, room for its cells, and nobody who is reading its prefix.
``scheduler``: which decodes how many tokens, and which makes room? Its rule keeps every request moving. ``turns``: a
deterministic request runs alone, in turns with the others. ``backlog``: how much work is ahead of a new request, so that
one that is refused learns when to come back.
"""
