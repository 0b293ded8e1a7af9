"""What a reply must look like, as a grammar: JSON schemas, grammars of the client, forced tool calls. Pure.

A body and the syntax of a model come in, a ``Constraint`` or none goes out. ``reply_constraint`` decides which constraint
a request has; ``json_schema`` makes a client's schema fit for it; ``tool_grammar`` writes tool calls in each format that
``gateway.parsing`` reads. The engine compiles the result (``llama.constraints``) and picks only tokens that it allows.
"""
