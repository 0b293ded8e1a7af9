"""A model's MTP head: one more block of the model, which guesses the token after the next one.

``head`` is its context beside the model's own, with the same sequences, and says what it knows of each of them;
``tail`` adds the head's part to kept states and segments. Decides nothing: ``engine.speculation`` says when to draft.
"""
