"""Splits a model's output into reasoning, tool calls and content while it streams. Pure.

Text comes in piece by piece, and pieces go out as soon as each is certain. ``output_parser`` is what callers use, and
knows the model's syntax, detected from its template. ``reasoning`` splits thinking from the answer; ``tool_parser`` finds
calls in the formats of ``tool_formats``, which read text through a ``tool_reader`` and values with ``tool_values``. What
turns out to be no call is text again, in order.
"""
