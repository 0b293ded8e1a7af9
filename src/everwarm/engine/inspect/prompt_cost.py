"""What a prompt would cost now: how much of it is known and could be restored from RAM or the device. Changes nothing."""

from __future__ import annotations

from everwarm.engine.core import Core
from everwarm.engine.process.messages import PromptCost
from everwarm.prompt.prompt import Prompt


def prompt_cost(core: Core, prompt: Prompt, namespace: str) -> PromptCost:
    """What is only on disk or in the remote store counts as to be read."""
    match = core.cache.restorer.match(prompt, namespace, core.cache.restorer.sources(prompt, namespace))
    n_known = match.n_kv
    if core.context.kind.needs_checkpoints:
        n_known = max((node.n_items for node in match.usable), default=0)
    n_prompt = int(prompt.n_tokens(len(prompt)))
    n_cached = int(prompt.n_tokens(min(n_known, len(prompt))))
    read_s = (n_prompt - n_cached) * core.speed.seconds_per_token
    return PromptCost(n_prompt, n_cached, read_s, n_prompt < core.context.n_ctx)
