"""Why a prompt was read again: compares two requests as a server would read them, and gives the reason.

``explain`` renders and compares, with a model file or by asking a running server; ``prompt_diff`` finds where two
prompts diverge; ``causes`` guesses what changed in the bodies.
"""
