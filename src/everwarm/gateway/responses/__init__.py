"""OpenAI's ``/v1/responses``: its body and the stored conversation in, items and typed events out.

``schema`` parses body, items and tools and translates them to ``ChatBody``. ``routes`` creates responses, whole, streamed
or in the background (``background_responses``), also as the continuation of a stored one, and gets, cancels and deletes
them. ``encode`` writes items and numbered events.
"""
