"""llama-server's own routes: completion, tokenize, templates, props, and slots with their files."""
