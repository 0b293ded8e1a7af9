"""From a chat body to what the engine reads, and from what it writes to chat events. Every dialect passes through
here.

``prepare`` turns a body into a ``PreparedChat``; ``chat_template`` renders messages with the model's own Jinja
template (``jinja_template``), in roles it knows (``roles``) and content forms it takes (``content``), without
volatile noise (``canonicalize``). ``stable_points`` and ``breakpoints`` find where the prompt should be cut.
``generate`` runs the choices of a request against the engine, ``stream`` tells a reply as chat events,
``next_turn`` offers what comes next to the engine's idle time. ``prefix_keys`` names a request's beginning without
a template, for routing between replicas.
"""
