"""Why a prompt was read: two requests compared as a server would have read them, and the reason in words.

``explain`` renders and compares, ``prompt_diff`` finds where two prompts part, ``causes`` guesses what changed in
the bodies, ``server_vocab`` asks a running server instead of a model file.
"""
