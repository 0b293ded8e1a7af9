"""How costs grow: with the context, with the number of turns, of checkpoints, of slots, and of objects on disk.

    context   what is done to one long conversation, from 1k to 256k tokens, on libllama itself
    turns     bringing a conversation back that came about in 1 to 100 turns, on a whole engine
    tree      what is done to the tree of prefixes, from 10 to 100k checkpoints; blobs weigh nothing
    slots     the engine's own part of a step, from 1 to 32 slots
    disk      what the disk tier does, from 1k to 100k objects
    fit       exponents, and what they ought to be (pure)

``python -m bench scaling`` writes docs/benchmarks/scaling.md with its plots and data.
"""

from bench.scaling.report import run

__all__ = ["run"]
