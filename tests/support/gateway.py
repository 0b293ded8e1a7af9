"""A gateway whose engine is a fake: it remembers what it is sent, and answers with what it is told to."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec

from everwarm.demo import EMBEDDED_MODEL
from everwarm.engine.process import messages as m
from everwarm.engine.settings import EngineSettings
from everwarm.gateway.app import build_gateway
from everwarm.gateway.settings import ServerSettings
from everwarm.llama.model import Model
from everwarm.router.pool import Pool

REPLY = [
    m.Begun(1, 9, 4, 0, 5),
    m.TextPiece(1, "Four", [7]),
    m.TextPiece(1, " teen", [8, 9]),
    m.Done(1, ".", "stop", None, 9, 4, 4, 3, 0, None, 0.0, 0.0, 0.1, 0.1),
]


class FakeSupervisor:
    def __init__(self, info: m.ModelInfo) -> None:
        self.info = info
        self.is_running = self.is_ready = True
        self.submits: list[m.Submit] = []
        self.questions: list[dict[str, Any]] = []
        self.reply: list[m.ToGateway] = list(REPLY)

    async def wait_ready(self) -> m.ModelInfo:
        return self.info

    async def stream(self, submit: m.Submit, lend: object = None) -> AsyncGenerator[m.ToGateway, None]:  # noqa: ARG002
        self.submits.append(submit)
        for message in self.reply:
            yield message

    async def ask(self, _question: object, **fields: Any) -> Any:
        self.questions.append(fields)
        return 42

    def tell(self, _message: object) -> None:
        pass


class FakePool:
    """Of one model, which is loaded."""

    def __init__(self, supervisor: FakeSupervisor) -> None:
        spec = SimpleNamespace(template=None, id="tiny", settings=EngineSettings())
        self.served = SimpleNamespace(id="tiny", spec=spec, supervisor=supervisor)
        self.catalog = SimpleNamespace(specs={}, find=lambda _: spec)

    def find(self, _name: str | None) -> Any:
        return self.served

    def backlogs(self) -> list[m.Backlog]:
        return []

    @contextlib.contextmanager
    def lease(self, _name: str | None) -> Iterator[Any]:
        async def ready() -> Any:
            return self.served

        async def waiting(_every_s: float) -> AsyncIterator[float]:
            for fraction in ():
                yield fraction

        yield SimpleNamespace(served=self.served, ready=ready, waiting=waiting)


def embedded_info() -> m.ModelInfo:
    """Of the embedded model, without an engine."""
    with Model(EMBEDDED_MODEL, vocab_only=True) as model:
        vocab = model.vocab
        bos, eos = (b"" if token is None else vocab.piece(token) for token in (vocab.bos, vocab.eos))
        numbers = {name: 1 for name, kind in m.ModelInfo.__annotations__.items() if kind == "int"}
        words = {"description": "", "memory_kind": "", "build": "", "bos": bos.decode(), "eos": eos.decode()}
        fields = numbers | words | {"n_ctx": 4096, "chat_template": model.chat_template, "adds_bos": vocab.adds_bos}
        return msgspec.convert(fields, m.ModelInfo)


class FakeGateway:
    def __init__(self, **settings: Any) -> None:
        self.supervisor = FakeSupervisor(embedded_info())
        pool = cast(Pool, FakePool(self.supervisor))
        self.app = build_gateway(pool, ServerSettings(prewarm=False, **settings)).app

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        transport = httpx.ASGITransport(cast(Any, self.app))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, json=body, headers=headers)
