"""The engine as a process: frames in and out, texts to prompts, tokens to text.

``worker`` is the process, ``messages`` what it exchanges with the gateway, ``request_handler`` the way from a
message to the core and from an event to a message. ``preparation`` does long work (tokenizing, trying a constraint)
off the reading thread.
"""
