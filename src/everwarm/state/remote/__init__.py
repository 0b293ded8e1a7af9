"""The remote tier: objects shared by many servers through a store that is not trusted.

``remote_tier`` reads and writes, ``bucket`` speaks to the store by URL, ``download`` fetches one object in pieces,
``pointer`` names what can be found and authenticates it, ``circuit_breaker`` stops asking a store that fails.
"""
