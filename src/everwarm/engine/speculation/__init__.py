"""Speculative decoding: several tokens of a reply in one decode, and never a token that the model would not have written.

``lookup`` proposes what followed the last words before, in the reply's own text and in other conversations; that costs next
to nothing. ``model_drafter`` asks a smaller model or the model's own MTP head. ``step_cost`` measures what a step costs by
its rows; from that and from what was accepted ``draft_length`` decides when drafts are looked for and how many tokens are
worth verifying. ``speculator`` brings these together for a step of the core, compares a draft with what is picked, and
takes the rest out of the context again.
"""
