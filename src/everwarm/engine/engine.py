"""The engine as a library: submit prompts from any thread, read tokens as they come.

    with Engine("model.gguf") as engine:
        stream = engine.submit("Once upon a time", max_tokens=32)
        for token in stream: ...
        print(stream.result().n_cached)

One thread owns the token loop (``Core``); requests go in through an inbox, events come out through each stream.
Tokenizing happens on the caller's thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from everwarm.config import Constraint, Sampling
from everwarm.engine.build import assemble
from everwarm.engine.core import Core
from everwarm.engine.loop import Job, start
from everwarm.engine.process.messages import CutHints, SentMedia
from everwarm.engine.request import Ask, Event, Finished, NewToken, Result
from everwarm.engine.settings import EngineSettings
from everwarm.errors import EngineStopped
from everwarm.llama.constraints.matcher import ConstraintCompiler
from everwarm.llama.lib import Closing
from everwarm.prompt.prompt import Prompt
from everwarm.prompt.tokenizer import Tokenizer

log = logging.getLogger("everwarm.engine")

T = TypeVar("T")


class TokenStream:
    """The reply of one request: iterate for its tokens, then ask for the ``result``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.request_id: int | None = None

    def events(self) -> Iterator[Event]:
        """Everything that happens to the request, ``Finished`` last."""
        while self._result is None:
            event = self._error or self._events.get()
            if isinstance(event, BaseException):
                self._error = event
                raise event
            if isinstance(event, Finished):
                self._result = event.result
            yield event

    def __iter__(self) -> Iterator[int]:
        return (event.token for event in self.events() if isinstance(event, NewToken))

    def result(self) -> Result:
        """Waits for the end; tokens not yet iterated are in it all the same."""
        self._ended.wait()  # once, and not for every token: that would take a core from the loop
        for _ in self.events():
            pass
        assert self._result is not None
        if self._result.error is not None:
            raise self._result.error
        return self._result

    def cancel(self) -> None:
        """Stop at the next step. What was read stays known."""
        self._engine._cancel(self)

    def _put(self, event: Event | BaseException) -> None:
        self._events.put(event)
        if isinstance(event, Finished | BaseException):
            self._ended.set()


class Engine(Closing):
    """A loaded model and everything it remembers. Use as a context manager."""

    def __init__(
        self,
        model_path: str | Path,
        settings: EngineSettings | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.settings = settings or EngineSettings()
        self._streams: dict[int, TokenStream] = {}
        self._failure: EngineStopped | None = None
        self._loop = start(lambda: assemble(Path(model_path), self.settings, progress), self._deliver, self._ended)
        self.core = self._loop.core
        self.model = self.core.model
        self.tokenizer = Tokenizer(self.model.vocab)
        self.constraints = ConstraintCompiler(self.model.vocab)

    def prompt(self, text: str, *, add_special: bool = True) -> Prompt:
        return self.tokenizer.tokenize(text, add_special=add_special)

    def submit(
        self,
        prompt: Prompt | str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 256,
        boundaries: Sequence[int] = (),
        stable: int | None = None,
        namespace: str = "",
        use_cache: bool = True,
        deterministic: bool = False,
        ignore_eos: bool = False,
        images: Mapping[bytes, SentMedia] | None = None,
        constraint: Constraint | None = None,
        lora: Sequence[float] | None = None,
    ) -> TokenStream:
        """Queue a prompt. ``boundaries`` are message ends and ``stable`` the prefix the next turn will share, in items;
        ``images`` the pixels of its media items, by their digests; ``constraint`` what the reply must look like; ``lora``
        other scales of the model's adapters than it was opened with."""
        if isinstance(prompt, str):
            prompt = self.prompt(prompt)
        elif not isinstance(prompt, Prompt):
            prompt = Prompt.of_tokens(prompt)
        ask = Ask(
            prompt,
            images or {},
            None if constraint is None else self.constraints.compile(constraint, namespace),
            hints=CutHints(tuple(boundaries), stable),
            sampling=sampling or Sampling(),
            max_tokens=max_tokens,
            namespace=namespace,
            use_cache=use_cache,
            deterministic=deterministic,
            ignore_eos=ignore_eos,
            lora=None if lora is None else tuple(lora),
        )
        stream = TokenStream(self)
        self._post(lambda core: self._begin(core, ask, stream))
        return stream

    def call(self, job: Callable[[Core], T]) -> T:
        """Run something on the engine's thread between two steps, and wait for what it returns."""
        answer: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

        def run(core: Core) -> None:
            try:
                answer.put(job(core))
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                answer.put(error)

        self._post(run)
        got = answer.get()
        if isinstance(got, BaseException):
            raise got
        return got

    def close(self) -> None:
        """Stop the loop, end what still runs, put away what is worth it, free the model. Safe to call twice."""
        self.constraints.close()
        if self._loop.thread.is_alive():
            self._loop.stop()
            self._loop.thread.join()
            self.core.put_away()
        self.core.close()

    # on the engine's thread

    def _ended(self, failure: BaseException | None) -> None:
        if failure is None:
            self._failure = EngineStopped("the engine was closed")
        else:
            log.error("the engine stopped", exc_info=failure)
            self._failure = EngineStopped(f"the engine stopped: {failure}")
        for stream in self._streams.values():
            stream._put(self._failure)
        self._streams.clear()

    def _begin(self, core: Core, ask: Ask, stream: TokenStream) -> None:
        if self._failure is not None:
            return stream._put(self._failure)
        try:
            request = core.submit(ask)
        except Exception as error:  # noqa: BLE001 - the caller's mistake is the caller's to see
            return stream._put(error)
        stream.request_id = request.id
        self._streams[request.id] = stream

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if isinstance(event, Finished):
                self._streams.pop(event.request_id, None)
            if stream is not None:
                stream._put(event)

    def _post(self, job: Job) -> None:
        if self._failure is not None:
            raise self._failure
        self._loop.post(job)

    def _cancel(self, stream: TokenStream) -> None:
        def run(core: Core) -> None:
            if stream.request_id is not None:
                core.cancel(stream.request_id)

        self._post(run)
