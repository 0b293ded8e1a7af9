"""Seeded sessions as agents and chats have them: as messages with real text, and as token streams for the simulator.

    scenarios.SCENARIOS   one function per thing that happens to a conversation
    scenarios.mixed       many sessions at once, over hours
    volatile              text that changes inside a message: system prompts and edited results
    chat                  from messages to tokens, with the hints a server would give
    text                  words, files, tool results and images

Pure: the same seed gives the same bytes. ``python -m bench.workload`` writes traces.
"""
