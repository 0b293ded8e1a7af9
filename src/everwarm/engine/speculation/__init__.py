"""Speculative decoding: several tokens of a reply in one decode, and never a token that the model would not have written.

``drafter`` is the interface of all that propose tokens; ``suffix_lookup`` proposes what followed the last words before,
``tree_lookup`` what followed them in other conversations, ``head_drafter`` asks the model's own MTP head, and
``model_drafter`` a smaller model.
``draft_length`` decides how many are worth verifying, from what was accepted and from what a step costs; ``pacing`` keeps
what was measured of both (``step_cost``). ``verification`` picks the tokens that a draft is compared with, ``rollback``
takes what was not accepted out of the context again, ``stop_watch`` sees where a reply's text ends, and ``speculator``
brings these together for a step of the core.
"""
