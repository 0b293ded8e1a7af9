"""Splits a model's output into reasoning, tool calls and content while it streams.

``output_parser`` is what callers use, and knows the model's syntax. ``reasoning`` splits thinking from the
answer; ``tool_parser`` finds calls in the formats of ``tool_formats``, which read text through a ``tool_reader``
and values with ``tool_values``. Pure.
"""
