"""Anthropic's ``/v1/messages``: its body in, its message or its events out.

``schema`` parses the body into types and translates it to OpenAI's ``ChatBody``, so that everything below exists once.
``routes`` answers messages and counts tokens. ``encode`` writes a reply as one message, or as the events that open, fill
and close its blocks, with usage that tells cache reads from cache writes.
"""
