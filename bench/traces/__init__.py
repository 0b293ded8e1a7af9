"""Recorded agent sessions, replayed on any OpenAI server: what was cached, what was read again, and how soon words came.

    recorded   two public forms of recordings to sessions (pure): Mooncake's lines, and traces with nested subagents
    sample     a small recording in both forms, made from a seed, with the bodies that real clients send (pure)
    replay     sessions to one server, several clients at a time, with a kill and a model swap in the midst
    depth      tokens per second at the end of a long context
    command    ``python -m bench traces``: Everwarm and llama-server in turns, medians of all rounds

A recording has the client's side: each reply is as long as the recorded one, and thrown away.
"""

from bench.traces.command import main, run

__all__ = ["main", "run"]
