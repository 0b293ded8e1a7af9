"""The engine as a process: frames from the gateway in, frames back out.

``worker`` is the process with its threads, ``messages`` what it exchanges with the gateway, ``request_handler`` the way
from a message to the core (texts become prompts) and from an event to a message. ``preparation`` does long work
(tokenizing, trying a constraint) off the reading thread. ``reply_text`` makes text of tokens as soon as it is certain, and
holds back what may begin a stop string. ``embedding_worker`` is what the process of an embedding model does instead.
"""
