"""Authentication, authorization and admission: keys and roles, the middleware that checks them, limits and
``Retry-After``.
"""
