"""From a chat body to the prompt that the engine reads. Every dialect passes through here.

``prepare`` has ``prepare_chat``, the only function that does this: text, cut hints and images come out of it.
``reply_memory`` gives replies that come back the form that the model wrote, ``content`` knows the forms of message content
and the breakpoints in it, ``chat_template`` renders messages in roles that the template shows, with the model's own Jinja
template (``jinja_template``, sandboxed). ``message_forms`` brings messages into the form that a template takes,
and finds how it writes thinking. ``stable_points`` finds where the prompt should be cut, by rendering likely next turns,
and ``volatile_text`` where its text is likely to change. ``prefix_keys`` makes keys of a request's prefixes without a
template, for routing between replicas.
"""
