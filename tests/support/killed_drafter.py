"""A process that writes a reply, keeps it, and is killed while it verifies a draft of the next one.

python -m support.killed_drafter REQUEST     (JSON: prompt, following, store or memory)
"""

import json
import os
import signal
import sys

from everwarm.engine.settings import StoreSettings
from support.drafts import always_draft, drafting_core
from support.drive import run, submit, tidy
from support.models import EMBEDDED

SETTINGS = {"speculate": "mtp", "n_slots": 1, "n_ctx": 2048}


def killed_core(store: str | None, memory: int | None):
    kept = None if store is None else StoreSettings(store, restore_policy="always")
    return drafting_core(path=EMBEDDED, store=kept, memory=memory, **SETTINGS)


def main() -> None:
    about = json.loads(sys.argv[1])
    with killed_core(about["store"], about["memory"]) as core:
        always_draft(core)
        run(core, about["prompt"], about["n_reply"])
        tidy(core)
        core.cache.ram.flush()
        core.cache.tiers.wait_open(60.0)
        while core.tidy() or core.cache.tiers.catch_up():
            pass
        core.cache.tiers.flush_all()
        decode = core.context.decode

        def dying(feeds) -> None:
            decode(feeds)
            if any(feed.n_draft for feed in feeds):
                print("verifying", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        object.__setattr__(core.context, "decode", dying)
        submit(core, about["following"], 40)
        while True:
            core.step()


if __name__ == "__main__":
    main()
