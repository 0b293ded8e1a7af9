"""Who may do what, and how much of it at once: keys, roles and admission. What comes in is a request's head.

``middleware`` runs before every route: it checks the host, the key, the content type and the size of
the body, and turns every error into the shape of the dialect. ``origins`` says which web pages may call, and under which
names. ``auth`` has the keys and their file, the role of every route, and the namespace that a caller's prompts are cached
in. ``limits`` gives each request a place, or answers 429 with the seconds after which there will be one. Knows no engine
and no bodies.
"""
