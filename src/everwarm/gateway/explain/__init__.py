"""Why a prompt was read again: two request bodies in; what they share, what is read, and why, out.

``explain`` renders and tokenizes both as the server would, with a model file or by asking a running server, and puts the
answer together. ``prompt_diff`` compares two prompts: where they part, which checkpoint the second resumes from, and the
engine's reason for the rest. ``causes`` guesses from the bodies what changed: a date, tools in another order, thinking
that was dropped. The last two are pure. ``everwarm explain`` prints it.
"""
