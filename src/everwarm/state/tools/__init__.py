"""What ``everwarm cache`` does with a state directory. Works without an engine, some of it beside a running one.

``inventory`` lists and inspects what a directory holds, without a lock or a write, and frees space in whole lineages,
so that no state is left without its KV. ``bundle`` takes states with everything they need into one file and back; a
file that is imported is treated as hostile.
"""
