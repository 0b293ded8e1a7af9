"""Speculative decoding: several tokens of a reply in one decode, and never a token that the model would not have written.

``suffix_lookup`` proposes what followed the last words before, ``tree_lookup`` what followed them in other conversations;
both cost next to nothing. ``model_drafter`` asks a smaller model or the model's own MTP head.
``draft_length`` decides how many are worth verifying, from what was accepted and from what a step costs; ``pacing`` keeps
what was measured of both. ``rollback`` takes what was not accepted out of the context again. ``speculator`` brings these
together for a step of the core, and compares a draft with what is picked.
"""
