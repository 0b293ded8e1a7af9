"""What a caller wants becomes a request, or is refused with a reason, before it can abort libllama."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from everwarm.config import MAX_SCALE, require
from everwarm.engine.images import ImageCache
from everwarm.engine.process.reply_text import ReplyText
from everwarm.engine.request import Ask, Request
from everwarm.engine.scheduling.admission import require_possible
from everwarm.engine.settings import EngineSettings
from everwarm.engine.slotfile.unverified import Unverified
from everwarm.engine.speculation.speculator import Speculator
from everwarm.errors import BadRequest
from everwarm.llama.context import Context
from everwarm.llama.sampler import Sampler, ThinkingLimit
from everwarm.llama.vocab import Vocab
from everwarm.state.lineage import adapted


@dataclass(frozen=True, slots=True)
class Intake:
    context: Context
    settings: EngineSettings
    images: ImageCache | None
    unverified: Unverified
    speculator: Speculator

    def request(self, ask: Ask) -> Request:
        model = self.context.model
        require_possible(ask, self.context, self.settings, self.images)
        ask = self.unverified.route(_with_own_namespace(ask, model.scales))
        matcher = None if ask.constraint is None else ask.constraint.matcher(ignore_eos=ask.ignore_eos)
        sampler = Sampler(
            model,
            ask.sampling,
            ask.prompt.tokens,
            matcher,
            ignore_eos=ask.ignore_eos,
            limit=None if ask.thinking is None else ThinkingLimit(model.vocab, ask.thinking),
            n_candidates=ask.n_probs if ask.post_sampling else None,
        )
        n_more = ask.prompt.n_tokens(len(ask.prompt)) - len(ask.prompt)  # cells of images beyond one each
        room = min(len(ask.prompt) + ask.max_tokens, self.settings.n_ctx_of_request(self.context.n_ctx) - n_more)
        request = Request(ask, sampler, room, time.monotonic())
        if ask.stop and self.speculator.is_on:  # no draft is verified beyond a stop string
            request.stop_watch = _stop_watch(model.vocab, ask.stop)
        return request


def _with_own_namespace(ask: Ask, own: tuple[float, ...]) -> Ask:
    """The request in the namespace of its scales. ``own``: those that the model was opened with."""
    if ask.lora is None:
        return ask
    if len(ask.lora) != len(own):
        raise BadRequest(f"lora has {len(ask.lora)} scales; this model has {len(own)} adapters")
    require(all(-MAX_SCALE <= scale <= MAX_SCALE for scale in ask.lora), f"a scale of lora is not within ±{MAX_SCALE}")
    if ask.lora == own:
        return replace(ask, lora=None)
    return replace(ask, namespace=adapted(ask.namespace, ask.lora))


def _stop_watch(vocab: Vocab, stops: Sequence[str]) -> Callable[[int], bool]:
    """Told every token of a reply, it says whether the text, as its reader sees it, holds a stop string after this one."""
    text = ReplyText(stops)

    def holds_a_stop(token: int) -> bool:
        text.feed(vocab.piece(token))
        return text.stop is not None

    return holds_a_stop
