"""What a caller wants becomes a request, or is refused with a reason, before it can abort libllama."""

from __future__ import annotations

import time
from dataclasses import dataclass

from everwarm.engine.images import ImageCache
from everwarm.engine.request import Ask, Request
from everwarm.engine.scheduling.adapter_turns import with_own_namespace
from everwarm.engine.scheduling.admission import require_possible
from everwarm.engine.settings import EngineSettings
from everwarm.engine.slotfile.unverified import Unverified
from everwarm.engine.speculation.speculator import Speculator
from everwarm.engine.speculation.stop_watch import StopWatch
from everwarm.llama.constraints.thinking_limit import ThinkingLimit
from everwarm.llama.context import Context
from everwarm.llama.sampler import Sampler


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
        ask = self.unverified.route(with_own_namespace(ask, model.scales))
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
            request.stop_watch = StopWatch(model.vocab, ask.stop)
        return request
