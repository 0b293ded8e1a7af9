"""Who may do what, and how much at once: keys and roles, the middleware that asks for them, limits and
``Retry-After``.
"""
