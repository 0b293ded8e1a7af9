"""From a model's text to what it means, while it is being written: reasoning, tool calls, content.

``output_parser`` is what callers use, and knows how this model writes. ``reasoning`` splits thinking from the
answer; ``tool_parser`` finds calls in the formats of ``tool_formats``, which take text from a ``tool_reader`` and
values by ``tool_values``. Pure.
"""
