"""llama-server's own routes: completion, infill, tokenize, templates, props, adapters, and slots with their files.

``routes`` answers them, with the bodies of ``openai.schema``; a slot file's name is checked here, its bytes are read and
written by the engine. ``infill`` makes the prompt of ``/infill``. ``encode`` writes replies and lists of tokens in
llama-server's JSON.
"""
