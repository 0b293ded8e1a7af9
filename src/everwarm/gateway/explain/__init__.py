"""Why a prompt was read: two requests compared as a server would have read them, and the reason in words.

``explain`` renders and compares, with a model file or by asking a running server; ``prompt_diff`` finds where two
prompts part; ``causes`` guesses what changed in the bodies.
"""
