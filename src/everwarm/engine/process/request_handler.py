"""Between frames and the core: texts become prompts, events become pieces of text.

``handle`` runs on the reader's thread (tokenizing drops the GIL), ``deliver`` and the jobs on the loop's. What may keep the
reader busy for long, a constraint that is new, a long text or a sound, is prepared on other threads. Outside of the
loop's thread only parts that never change are used: the vocabulary, the length of the context, the image model. The last
frame of a reply waits until ``cache.offload`` says that its turn is safe. Knows no sockets.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from everwarm.config import Sampling
from everwarm.engine.cache.offload import Where
from everwarm.engine.core import Core
from everwarm.engine.images import image_prompt
from everwarm.engine.inspect.cache_commands import CacheCommands
from everwarm.engine.inspect.report import prompt_cost, report
from everwarm.engine.loop import Loop
from everwarm.engine.process import messages as m
from everwarm.engine.process.preparation import Preparing
from everwarm.engine.process.reply_text import ReplyText
from everwarm.engine.request import (
    Ask,
    Event,
    Finish,
    Finished,
    NewToken,
    Probs,
    Progress,
    Result,
    Started,
)
from everwarm.engine.slotfile.slot_commands import SlotCommands
from everwarm.errors import BadRequest, EverwarmError, PromptTooLong
from everwarm.llama.constraints.matcher import ConstraintCompiler
from everwarm.prompt.prompt import Prompt
from everwarm.prompt.tokenizer import Tokenizer

log = logging.getLogger("everwarm.engine")

Send = Callable[[m.Message], None]

LONG_TEXT = 64 << 10  # characters; longer ones are not tokenized by the reader
_COUNTED_CONTEXTS = 4  # a text is counted if it may fit a context of so many times this one
GATHER_S = 0.016  # tokens that come faster than a screen shows them travel together: every frame costs the gateway


@dataclass(slots=True)
class Reply:
    """One request that was accepted, by the gateway's number."""

    id: int
    text: ReplyText
    wants_progress: bool
    wants_words: bool = False  # of where its prompt leaves what was known
    began_at: float = field(default_factory=time.monotonic)
    stop_text: str | None = None
    n_stable: int = 0
    n_cached: int = 0
    slot: int = -1
    has_spoken: bool = False
    max_write_s: float | None = None  # from its first token on, once it has a new line
    first_token_at: float | None = None
    has_new_line: bool = False
    # gathered, not sent yet
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    probs: list[m.TokenProb] = field(default_factory=list)


class RequestHandler:
    def __init__(self, core: Core, send: Send) -> None:
        self._core = core
        self._n_ctx = core.settings.n_ctx_of_request(core.context.n_ctx)
        self._images = core.images
        self._vocab = core.model.vocab
        self._tokenizer = Tokenizer(self._vocab)
        self._send = send
        self._replies: dict[int, Reply] = {}  # by the core's request id
        self._requests: dict[int, int] = {}  # the core's request id by the gateway's number
        self._gathering: dict[int, Reply] = {}  # replies with unsent tokens, by the gateway's number
        self._sent_at = 0.0
        self._aside = ThreadPoolExecutor(1, "everwarm-aside")
        self._preparing_constraints = Preparing("constraints")
        self._preparing_texts = Preparing("texts", max_waiting_each=256)
        self._slot_commands = SlotCommands(core, send)
        self._cache_commands = CacheCommands(core, send, self._number_of)
        self._constraints = ConstraintCompiler(self._vocab)

    # frames in, on the reader's thread

    def handle(self, message: m.ToEngine, loop: Loop) -> None:
        self._answering(message, lambda: self._dispatch(message, loop))

    def _answering(self, message: m.ToEngine, work: Callable[[], None]) -> None:
        """Never raises for the content of a frame: the sender gets the error."""
        try:
            work()
        except EverwarmError as error:
            self._send(m.failed(getattr(message, "id", 0), error))
        except Exception:
            log.exception("%s could not be handled", type(message).__name__)
            self._send(m.failed(getattr(message, "id", 0), EverwarmError("internal error")))

    def _dispatch(self, message: m.ToEngine, loop: Loop) -> None:
        match message:
            case m.Submit():
                self._take(message, loop)
            case m.Prewarm():
                self._aside.submit(self._offer, message, loop)
            case m.Cancel(id=id):
                if not self._preparing_constraints.cancel(id) and not self._preparing_texts.cancel(id):
                    loop.post(lambda core: core.cancel(self._requests.get(id, -1)))
            case m.Tokenize() | m.Detokenize():
                # a long text must not keep others waiting
                self._aside.submit(self._answering, message, lambda: self._answer(message))
            case m.AskPrompt():
                self._aside.submit(self._answering, message, lambda: self._answer_of_prompt(message, loop))
            case m.SlotAction():
                self._slot_commands.handle(message, loop)
            case m.AskTree() | m.CacheOrder():
                self._cache_commands.handle(message, loop)
            case m.Inspect():
                loop.post(lambda core: self._report(core, message))
            case _:
                raise BadRequest(f"{type(message).__name__} is not for a running engine")

    def _take(self, message: m.Submit, loop: Loop) -> None:
        """Prepares a request at once where that is quick; all later frames wait for it."""
        if message.constraint is not None and not self._constraints.is_settled(message.constraint, message.namespace):
            self._preparing_constraints.add(message.id, message.namespace, partial(self._prepare, message, loop))
        elif len(message.text or "") > LONG_TEXT or any(isinstance(each, m.SentSound) for each in message.images):
            self._preparing_texts.add(message.id, message.namespace, partial(self._prepare, message, loop))
        elif (post := self._prepare(message, loop)) is not None:
            post()

    def _prepare(self, message: m.Submit, loop: Loop) -> Callable[[], None] | None:
        """How to hand the request to the loop; None where it was refused."""
        try:
            self._check_length(message.text or "", self._n_ctx)
            ask = self._ask(message)
        except EverwarmError as error:
            self._send(m.failed(message.id, error))
        except Exception:
            log.exception("a request could not be prepared")
            self._send(m.failed(message.id, EverwarmError("internal error")))
        else:
            return partial(loop.post, lambda _: self._submit(message, ask))
        return None

    def _check_length(self, text: str, most: int) -> None:
        """What cannot fit by its bytes alone is not tokenized: that takes minutes for megabytes."""
        if len(text) <= LONG_TEXT or not self._vocab.splits_independently:
            return
        n_least = len(text.encode("utf-8", "replace")) // self._vocab.longest_piece_bytes
        if n_least > most:
            raise PromptTooLong(n_least, most, is_least=True)

    def _offer(self, message: m.Prewarm, loop: Loop) -> None:
        """No client waits for it, so a failure is only logged."""
        try:
            ahead = self._ask_ahead(message)
        except Exception:
            log.exception("what the next turn begins with could not be prepared")
            return
        if ahead is not None:
            loop.post(lambda core: core.offer_prewarm(ahead))

    def _answer(self, question: m.Tokenize | m.Detokenize) -> None:
        vocab = self._vocab
        if isinstance(question, m.Detokenize):
            return self._send(m.Answer(question.id, vocab.detokenize(question.tokens)))
        special = question.add_special
        parse = question.parse_special
        tokens = vocab.tokenize(question.text, add_special=special, parse_special=parse)
        pieces = [vocab.piece(token) for token in tokens.tolist()] if question.with_pieces else []
        sizes = np.fromiter(map(len, pieces), "<u4", len(pieces)).tobytes()
        self._send(m.Answer(question.id, m.Tokenized(tokens.astype("<i4").tobytes(), sizes, b"".join(pieces))))

    def _answer_of_prompt(self, question: m.AskPrompt, loop: Loop) -> None:
        n_most = _COUNTED_CONTEXTS * self._n_ctx if question.what == "count" else self._n_ctx
        self._check_length(question.submit.text or "", n_most)
        ask = self._ask(msgspec.structs.replace(question.submit, constraint=None))
        match question.what:
            case "count":
                self._send(m.Answer(question.id, ask.prompt.n_tokens(len(ask.prompt))))
            case "cost":
                loop.post(lambda core: self._send(m.Answer(question.id, prompt_cost(core, ask.prompt, ask.namespace))))
            case "hold":
                loop.post(lambda core: self._cache_commands.hold(core, question, ask.prompt, loop))

    def _ask(self, message: m.Submit) -> Ask:
        images: dict[bytes, m.SentMedia] = {}
        tokenizer = self._tokenizer.within(message.namespace)
        if message.text is not None and message.images:
            if self._images is None:
                raise BadRequest("this model reads text only: start it with --mmproj and its projector file")
            prompt, hints, images = image_prompt(self._images, tokenizer, message, message.text)
        elif message.text is not None:
            prompt, hints = _prompt_of_text(tokenizer, message, message.text)
        else:
            prompt = Prompt.of_tokens(message.tokens or [])
            hints = message.hints
        constraint = message.constraint
        compiled = None if constraint is None else self._constraints.compile(constraint, message.namespace)
        options = m.options_of(message) | {"hints": hints, "sampling": self._with_text_bias(message)}
        return Ask(prompt, images, compiled, **options)

    def _with_text_bias(self, message: m.Submit) -> Sampling:
        """Every token of a text gets its bias."""
        bias = dict(message.sampling.logit_bias)
        for text, value in message.text_bias:
            tokens = self._vocab.tokenize(text, add_special=False, parse_special=False).tolist()
            bias |= dict.fromkeys(tokens, value)
        return dataclasses.replace(message.sampling, logit_bias=bias) if message.text_bias else message.sampling

    def _ask_ahead(self, message: m.Prewarm) -> Ask | None:
        """All of the text that no continuation can change."""
        special = message.add_special
        tokenizer = self._tokenizer.within(message.namespace)
        prompt = tokenizer.tokenize(message.text, add_special=special)
        n = tokenizer.sure_count_at(message.text, len(message.text), add_special=special)
        if n < 2:
            return None
        stable = None
        if message.n_sure is not None:
            stable = min(n, tokenizer.sure_count_at(message.text, message.n_sure, add_special=special))
        return Ask(
            prompt.first(n),
            max_tokens=0,
            hints=m.CutHints(stable=stable),
            namespace=message.namespace,
            session=message.session,
            ahead=True,
        )

    # on the loop's thread

    def _submit(self, message: m.Submit, ask: Ask) -> None:
        self._send_gathered()  # the next step may be a long one
        try:
            request = self._core.submit(ask)
        except EverwarmError as error:
            return self._send(m.failed(message.id, error))
        wants = message.wants_progress, message.wants_diagnostics
        reply = self._replies[request.id] = Reply(message.id, ReplyText(message.stop), *wants)
        reply.n_stable = ask.prompt.n_tokens(ask.hints.stable or 0)
        reply.max_write_s = message.max_write_s
        self._requests[message.id] = request.id

    def _report(self, core: Core, question: m.Inspect) -> None:
        try:
            self._send(m.Answer(question.id, report(core, question.what, question.namespace)))
        except Exception:
            log.exception("the engine's %s could not be shown", question.what)
            self._send(m.failed(question.id, EverwarmError("internal error")))

    def _number_of(self, request_id: int) -> int:
        """The gateway's number of a request."""
        reply = self._replies.get(request_id)
        return -1 if reply is None else reply.id

    def deliver(self, events: list[Event]) -> None:
        for event in events:
            reply = self._replies.get(event.request_id)
            if reply is not None:
                self._deliver(event, reply)
        self._slot_commands.go_on()
        if self._core.is_reading:
            self._send_gathered()  # the next step may be a long one
        elif not (events and self._core.computes_aside and self._core.has_work):
            self.send_due()

    def send_due(self) -> None:
        """Sends what was gathered for long enough. On a GPU this is done while it computes the next step."""
        if time.monotonic() - self._sent_at >= GATHER_S:
            self._send_gathered()

    def _send_gathered(self) -> None:
        if not self._gathering:
            return
        for reply in list(self._gathering.values()):
            self._send_tokens(reply)
        self._sent_at = time.monotonic()

    def _send_tokens(self, reply: Reply) -> None:
        if self._gathering.pop(reply.id, None) is not None:
            self._send(m.TextPiece(reply.id, "".join(reply.pieces), reply.tokens, reply.probs or None))
            reply.pieces, reply.tokens, reply.probs = [], [], []

    def _deliver(self, event: Event, reply: Reply) -> None:
        match event:
            case NewToken():
                self._new_token(event, reply)
            case Started():
                reply.n_cached, reply.slot = event.n_cached, event.slot
                self._send(m.Begun(reply.id, event.n_prompt, event.n_cached, event.slot, reply.n_stable))
                if reply.wants_progress:
                    seconds = time.monotonic() - reply.began_at
                    self._send(m.PromptRead(reply.id, event.n_cached, event.n_prompt, event.n_cached, seconds))
            case Progress():
                if reply.wants_progress:
                    seconds = time.monotonic() - reply.began_at
                    self._send(m.PromptRead(reply.id, event.n_read, event.n_prompt, reply.n_cached, seconds))
            case Finished():
                self._send_tokens(reply)
                del self._replies[event.request_id]
                self._requests.pop(reply.id, None)
                self._finished(event, reply)

    def _new_token(self, event: NewToken, reply: Reply) -> None:
        if reply.stop_text is not None:
            return
        piece = self._vocab.piece(event.token)
        reply.pieces.append(reply.text.feed(piece))
        reply.tokens.append(event.token)
        if event.probs is not None:
            reply.probs.append(self._prob(event.token, event.probs))
        self._gathering[reply.id] = reply
        if not reply.has_spoken or event.probs is not None:  # probabilities are sent token by token
            reply.has_spoken = True
            self._send_tokens(reply)
        reply.has_new_line |= b"\n" in piece
        if reply.text.stop is not None:
            reply.stop_text = reply.text.stop
            self.deliver(self._core.stop(event.request_id))
        elif reply.max_write_s is not None and self._is_late(reply, reply.max_write_s):
            self.deliver(self._core.stop(event.request_id, Finish.LENGTH))

    @staticmethod
    def _is_late(reply: Reply, most_s: float) -> bool:
        now = time.monotonic()
        reply.first_token_at = reply.first_token_at or now
        return reply.has_new_line and now - reply.first_token_at > most_s

    def _prob(self, token: int, probs: Probs) -> m.TokenProb:
        top = [(t, self._vocab.piece(t), p) for t, p in probs.top]
        return m.TokenProb(token, self._vocab.piece(token), probs.logprob, top)

    def _finished(self, event: Finished, reply: Reply) -> None:
        """The last frame leaves when the turn would outlive this engine, or is known not to. No other request waits."""
        receipt = event.receipt
        offload = self._core.cache.offload
        last = self._last_frame(event.result, reply)
        if receipt is None or offload is None:
            return self._send(last)

        def send(where: Where) -> None:
            waited = time.monotonic() - receipt.ended_at
            is_done = isinstance(last, m.Done)
            self._send(msgspec.structs.replace(last, kept=where, keep_s=waited) if is_done else last)

        offload.when_safe(receipt, send)

    def _last_frame(self, result: Result, reply: Reply) -> m.Done | m.Failed:
        if result.error is not None:
            return m.failed(reply.id, result.error)
        rest = "" if reply.stop_text is not None else reply.text.finish()
        use, why = result.checkpoint, result.why or m.ReadReason()  # it may never have started
        if why.diverged is not None and not reply.wants_words:
            why = msgspec.structs.replace(why, diverged=m.Diverged(why.diverged.at))
        return m.Done(
            id=reply.id,
            text=rest,
            finish=Finish.STOP.value if reply.stop_text is not None else result.finish.value,
            stop_text=reply.stop_text,
            n_prompt=result.n_prompt,
            n_cached=result.n_cached,
            n_shared=result.n_shared,
            n_reply=len(result.tokens),
            slot=reply.slot,
            checkpoint=None if use is None else f"{use.kind}, {use.how}",
            queue_s=result.queue_s,
            restore_s=result.restore_s,
            prefill_s=result.prefill_s,
            decode_s=result.decode_s,
            why=why,
            n_drafted=result.n_drafted,
            n_draft_accepted=result.n_draft_accepted,
            n_shifts=result.n_shifts,
        )


def _prompt_of_text(tokenizer: Tokenizer, message: m.Submit, text: str) -> tuple[Prompt, m.CutHints]:
    """Hints in characters become hints in tokens that no later text can change."""
    count = partial(tokenizer.count_at, text, add_special=message.add_special)
    sure = partial(tokenizer.sure_counts_at, text, add_special=message.add_special)
    return tokenizer.tokenize(text, add_special=message.add_special), message.hints.counted(count, sure)
