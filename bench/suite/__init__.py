"""The same conversations played on Everwarm and on llama-server: what each reads again that it had read before.

    sessions   what is played: the scenarios of ``bench.workload`` as requests
    account    what an infinite cache would have known, and what each server read again (pure)
    servers    the servers under test, each a process that can be killed
    play       one scenario on all of them, in turns
    summary    figures out of rows (pure)
    report     Markdown and plots out of figures (pure)
    command    ``python -m bench suite``: resumable; rows to a file, then the report

No model says a word of what is played: each reply is one token that is thrown away, and the session's own text goes on.
"""

from bench.suite.command import main, run

__all__ = ["main", "run"]
