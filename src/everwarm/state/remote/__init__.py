"""The remote tier: objects shared by many servers through a store that is not trusted.

``remote_tier`` reads and writes, in pieces and only while the store answers; ``bucket`` speaks to the store by URL;
``pointer`` names what can be found and authenticates it.
"""
