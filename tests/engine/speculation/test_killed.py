"""A process that is killed in the midst of a verification loses nothing that was kept, and the next one drafts at once."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everwarm.llama import blobs
from everwarm.llama import context as llama_context
from everwarm.state.store.arena_file import memory_file
from support.drafts import CODE, STORY, always_draft, tokens_of
from support.drive import NEAR_TIE, check, regrets, run
from support.killed_drafter import killed_core

TESTS = Path(__file__).parents[2]
N_REPLY = 60


def uninterrupted():
    """A conversation of two turns: its prompts, and the second reply."""
    with killed_core(None, None) as core:
        always_draft(core)
        prompt = tokens_of(core, STORY)
        first = run(core, prompt, N_REPLY)
        following = [*prompt, *first.tokens, *tokens_of(core, CODE)]
        return prompt, following, run(core, following, 40)


def die_while_verifying(about: dict) -> None:
    fds = [] if about["memory"] is None else [about["memory"]]
    done = subprocess.run(
        [sys.executable, "-m", "support.killed_drafter", json.dumps(about)],
        cwd=TESTS,
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL and done.stdout == "verifying\n", done.stderr


@pytest.mark.parametrize("tier", ["memory", "store"])
def test_the_next_process_drafts_as_if_nothing_had_happened(tier, tmp_path, monkeypatch):
    prompt, following, expected = uninterrupted()
    memory = memory_file() if tier == "memory" else None
    about = {
        "prompt": prompt,
        "following": following,
        "n_reply": N_REPLY,
        "memory": memory,
        "store": str(tmp_path / "states") if tier == "store" else None,
    }
    die_while_verifying(about)
    starts = []
    for is_control in (False, True):
        if is_control:  # the same files, read as if they had no part of the head
            monkeypatch.setattr(llama_context, "split", lambda blob: (blobs.trunk(blob), None))
        with killed_core(about["store"], memory) as core:
            always_draft(core)
            core.cache.tiers.wait_open(60.0)
            again = run(core, following, 40)
            starts.append(core.context.head._tracks[core.slots[0].seq].start)
            assert again.n_cached >= len(prompt) + N_REPLY - 1
            assert regrets(core, following, again.tokens).max() < NEAR_TIE
            assert is_control or again.tokens == expected.tokens
            if not is_control:
                assert (again.n_drafted, again.n_draft_accepted) == (expected.n_drafted, expected.n_draft_accepted)
            check(core)
    assert starts[0] == 0 < starts[1]
    if memory is not None:
        os.close(memory)
