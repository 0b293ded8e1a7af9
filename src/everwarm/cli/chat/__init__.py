"""``everwarm chat``: a chat in the terminal that shows what was reused.

``session`` is the loop: it asks, sends, obeys commands, and keeps the messages. ``chat_server`` talks to a server or starts
one, ``terminal`` reads lines and shows replies.
"""
