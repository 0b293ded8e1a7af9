"""The codes that say why a prompt was read, with what helps."""

from __future__ import annotations

from everwarm.engine.process.messages import Reason
from generating.markdown import code, table, written_by

HELPS = {
    "hit": "nothing to do",
    "extended": "nothing to do: it is the new message",
    "edited_at": "put what changes last; see the [FAQ](../faq.md#why-did-it-read-my-prompt-again)",
    "new": "nothing to do: it is the first time",
    "no_checkpoint": "a smaller `--checkpoint-every`; send messages rather than one long text",
    "evicted": "more `--cache-ram`, more `--disk-cache`",
    "fingerprint": "the same model file, build and KV types as before (seen when the engine starts)",
    "load_slower_than_compute": "`--restore-policy always`, or a faster disk",
    "cache_off": 'leave out `cache_prompt: false` and `prompt_cache_options.mode: "off"`',
    "deterministic": "leave out `deterministic: true`",
    "refused": "see the log; `everwarm cache verify` looks at everything on disk",
    "checkpoints_off": "a `--max-checkpoints` above 0",
}


def page() -> str:
    return "\n".join(
        [
            written_by("src/everwarm/engine/inspect/read_reason.py"),
            "# Reason codes\n",
            "Every answer says in `timings.cache` why it read what it read; [the server](../server.md#why-was-it-read-again) has the whole "
            "object. `reason` is that of the larger part of what was read. `again` says why tokens that were known were read again, where "
            "that were more than 16. Both use these codes:\n",
            table(
                ["code", "meaning", "what helps"], [[code(r.value), r.words, HELPS.get(r.value, "")] for r in Reason]
            ),
            "`everwarm_prompt_tokens_read_total{reason=…}` in [the metrics](metrics.md) sums tokens by the reason of their request. "
            "`everwarm explain A.json B.json` says it of two requests without sending them.\n",
        ]
    )
