"""From a chat body to the prompt that the engine reads. Every dialect passes through here.

``prepare`` has ``prepare_chat``, the one function that does it; ``chat_template`` renders messages with the model's own
Jinja template (``jinja_template``), in roles it knows and content forms it takes (``content``), without volatile
noise (``canonicalize``). ``stable_points`` finds where the prompt should be cut.
``prefix_keys`` names a request's beginning without a template, for routing between replicas.
"""
