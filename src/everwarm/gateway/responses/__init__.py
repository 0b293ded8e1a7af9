"""OpenAI's ``/v1/responses``: request schema, tools, routes, typed events, and the store of responses that can be
continued.
"""
