"""From a chat body to the prompt that the engine reads. Every dialect passes through here.

``prepare`` has ``prepare_chat``, the only function that does this; ``chat_template`` renders messages with the model's own
Jinja template (``jinja_template``), in roles it knows and content forms it takes (``content``), without volatile
noise (``canonicalize``). ``stable_points`` finds where the prompt should be cut.
``prefix_keys`` makes keys of a request's prefixes without a template, for routing between replicas.
"""
