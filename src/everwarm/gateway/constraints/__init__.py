"""What a reply must look like, as a grammar: JSON schemas, grammars of the client, forced tool calls. Pure.

``reply_constraint`` decides which constraint a request has; ``json_schema`` makes a client's schema fit for it;
``tool_grammar`` writes tool calls in each format. The engine compiles the result (``llama.constraints``).
"""
