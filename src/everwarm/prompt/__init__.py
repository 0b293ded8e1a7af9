"""What is read: items, their two counters, and tokenizing. Values only; needs no libllama.

``prompt`` is a sequence of items, each a text token or a whole image; it compares prompts, and alone turns a count of
items into token counts and positions. ``tokenizer`` makes prompts of texts, exactly as libllama would for the whole text,
but pays only for what is new since the last one.
"""
