"""The guided demo: a conversation that loses its slot and comes back, an edit, a branch, a retry, six conversations on two
slots, a new engine that loads a conversation from disk, and an image. All numbers are measured while it runs; only the
questions are scripted.

The part with an image uses a tiny model with random weights, because the embedded one takes no images: its replies
mean nothing, but it reads and reuses what any model would.
"""

from __future__ import annotations

import contextlib
import logging
import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import blake3
import numpy as np
from rich.console import Console
from rich.table import Table

from everwarm.config import GREEDY
from everwarm.demo import EMBEDDED_MODEL
from everwarm.demo.tiny import TinySpec, projector_path, write_tiny, write_tiny_projector
from everwarm.engine.engine import Engine
from everwarm.engine.images import image_prompt
from everwarm.engine.process import messages as m
from everwarm.engine.request import Result
from everwarm.engine.settings import EngineSettings, StoreSettings
from everwarm.engine.verify import ExactReport, compare_with_cold
from everwarm.errors import BadRequest
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.prompt.prompt import Prompt
from everwarm.state.policy import CheckpointParams

N_CTX = 16384
SECRET = "48213"
SYSTEM = "You are a helpful assistant."

Messages = list[dict[str, str]]
WIDTH = 320
HEIGHT = 224
_MARKER = "\0picture\0"
_SHOWN = f"<|im_start|>user\nLook at this: {_MARKER} What is it?<|im_end|>\n<|im_start|>assistant\n"
_NEXT = "It is a gradient.<|im_end|>\n<|im_start|>user\nAnd what colour?<|im_end|>\n<|im_start|>assistant\n"


_NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Karin",
    "Lukas",
    "Mia",
    "Nils",
    "Olga",
    "Paul",
]
_THINGS = ("red key", "blue cup", "green hat", "old map", "small drum", "yellow kite", "black box", "white shell")
_PLACES = ["Oslo", "Rome", "Paris", "Lima", "Cairo", "Delhi", "Tokyo", "Madrid"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply, and what it cost."""

    text: str
    result: Result
    n_known: int  # how much of the prompt an infinite cache would have had

    @property
    def prompt_ms(self) -> float:
        return 1e3 * (self.result.restore_s + self.result.prefill_s)

    @property
    def regret(self) -> int:
        """Tokens read again that had been read before."""
        return max(0, self.result.n_processed - (self.result.n_prompt - self.n_known))


@dataclass(slots=True)
class DemoClient:
    """Chats with an engine and remembers everything it ever read, to measure regret."""

    engine: Engine
    template: ChatTemplate
    seen: list[Prompt] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @classmethod
    def open(cls, model: Path, checkpoints: CheckpointParams, store: StoreSettings | None = None) -> DemoClient:
        settings = EngineSettings(n_slots=2, n_ctx=N_CTX, checkpoints=checkpoints, ram_bytes=1 << 30, store=store)
        engine = Engine(model, settings)
        source = engine.model.chat_template
        if source is None:
            engine.close()
            raise BadRequest(f"{model.name} has no chat template; the demo needs one")
        return cls(engine, ChatTemplate(source))

    def say(self, messages: Messages, *, max_tokens: int = 64) -> Turn:
        rendered = self.template.conversation(messages, enable_thinking=False)
        tokenizer = self.engine.tokenizer
        prompt = self.engine.prompt(rendered.text)
        n_known = max((int(prompt.common_prefix(old)) for old in self.seen), default=0)
        result = self.engine.submit(
            prompt,
            GREEDY,
            max_tokens=max_tokens,
            boundaries=tokenizer.count_at(rendered.text, rendered.hints.boundaries, add_special=True),
            stable=tokenizer.safe_count_at(rendered.text, rendered.hints.stable or 0, add_special=True),
        ).result()
        self.seen.append(Prompt(np.concatenate([prompt.codes, np.array(result.tokens, np.int32)])))
        text = self.engine.model.vocab.detokenize(result.tokens).decode("utf-8", "replace")
        turn = Turn(text, result, n_known)
        self.turns.append(turn)
        return turn

    def reply(self, messages: Messages, question: str) -> Turn:
        """Ask, and keep both question and answer in the conversation."""
        messages.append({"role": "user", "content": question})
        turn = self.say(messages)
        messages.append({"role": "assistant", "content": turn.text})
        return turn


def run_tour(console: Console, model: Path | None) -> None:
    path = model or EMBEDDED_MODEL
    warm = DemoClient.open(path, CheckpointParams())
    cold = DemoClient.open(path, CheckpointParams(max_checkpoints=0))
    with warm.engine, cold.engine:
        _introduce(console, warm.engine)
        speed_up = _lost_slot(console, warm, cold)
        _retry_branch_edit(console, warm)
        _six_on_two(console, warm)
        _new_engine(console, path)
        show_images(console)
        _conclude(console, warm, speed_up)


def _introduce(console: Console, engine: Engine) -> None:
    model = engine.model
    sizes = engine.core.sizes
    console.print(
        f"\n[bold]{model.path.name}[/]: {model.n_params / 1e6:.1f} M parameters, {model.memory_kind.value} memory,\n"
        f"{sizes.shape.state_bytes / 1024:.0f} KiB of recurrent state per point, "
        f"{sizes.shape.kv_bytes_per_token:,} bytes of KV per token; 2 slots"
    )


def _lost_slot(console: Console, warm: DemoClient, cold: DemoClient) -> float:
    """Returns how much sooner the returning conversation was answered with checkpoints than without."""
    console.print("\n[bold]1. A conversation loses its slot and comes back.[/]\n")
    questions = [
        f"My secret code is {SECRET}.",
        f"Here is a text.\n{story(120, seed=1)}",
        "What is 7 + 8?",
        "What is the capital of France?",
        "What is my secret code?",
    ]
    conversations: dict[str, Messages] = {"warm": _new_conversation(), "cold": _new_conversation()}
    rows = []
    for i, question in enumerate(questions):
        if i == len(questions) - 1:
            _take_both_slots(warm)
            with _silenced():
                _take_both_slots(cold)
            console.print("  [dim](two other conversations of 1,400 tokens each take both slots)[/]")
        with_it = warm.reply(conversations["warm"], question)
        with _silenced():
            without = cold.reply(conversations["cold"], question)
        console.print(f"  [cyan]you[/]   {_short(question)}")
        console.print(f"  [green]model[/] {with_it.text}")
        rows.append((str(i + 1), with_it, without))
    console.print(_compare(rows))
    _, with_it, without = rows[-1]
    return without.prompt_ms / max(with_it.prompt_ms, 1e-3)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """What the engine without checkpoints reads again is the point, not a warning."""
    log = logging.getLogger("everwarm.engine")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _compare(rows: Iterable[tuple[str, Turn, Turn]]) -> Table:
    table = Table(title="\nTokens processed in the same turns, with and without checkpoints", title_justify="left")
    for name in ("turn", "prompt", "cached", "processed", "ms", "without", "ms"):
        table.add_column(name, justify="right")
    for name, with_it, without in rows:
        table.add_row(
            name,
            str(with_it.result.n_prompt),
            str(with_it.result.n_cached),
            str(with_it.result.n_processed),
            f"{with_it.prompt_ms:.1f}",
            str(without.result.n_processed),
            f"{without.prompt_ms:.1f}",
        )
    return table


def _retry_branch_edit(console: Console, warm: DemoClient) -> None:
    conversation = _new_conversation()
    for question in ("My name is Ada.", f"Here is a text.\n{story(120, seed=2)}", "What is 2 + 3?"):
        warm.reply(conversation, question)
    rows = [("first reading", warm.turns[-2]), ("next turn", warm.turns[-1])]
    retry = conversation[:-1]
    rows.append(("identical retry", warm.say(retry)))
    branch = [*conversation[:-2], {"role": "user", "content": "What is the capital of Italy?"}]
    rows.append(("another question (branch)", warm.say(branch)))
    edited = [*conversation]
    edited[1] = {"role": "user", "content": "My name is Grace."}
    rows.append(("first message edited", warm.say(edited[:-1])))
    edited_late = [*conversation[:-2], {"role": "user", "content": "What is 2 + 4?"}]
    rows.append(("last message edited", warm.say(edited_late)))
    table = Table(title="\n2. Retry, branch and edits (new: tokens that were never read before)", title_justify="left")
    table.add_column("what")
    for name in ("prompt", "cached", "processed", "new", "ms"):
        table.add_column(name, justify="right")
    for name, turn in rows:
        r = turn.result
        new = str(max(0, r.n_prompt - turn.n_known))
        table.add_row(name, str(r.n_prompt), str(r.n_cached), str(r.n_processed), new, f"{turn.prompt_ms:.1f}")
    console.print(table)


def _six_on_two(console: Console, warm: DemoClient) -> None:
    conversations = [_new_conversation() for _ in range(6)]
    turns: list[Turn] = []
    openers = [f"Here is a text.\n{story(40, seed=10 + i)}" for i in range(6)]
    for question in (None, "What is 1 + 6?", "What is the capital of Spain?"):
        turns += [warm.reply(conversation, question or openers[i]) for i, conversation in enumerate(conversations)]
    n_prompt = sum(turn.result.n_prompt for turn in turns)
    n_read = sum(turn.result.n_processed for turn in turns)
    regret = sum(turn.regret for turn in turns)
    console.print(
        f"\n[bold]3. Six conversations take turns on two slots:[/]\n   {len(turns)} requests with {n_prompt:,} prompt "
        f"tokens; {n_read:,} processed, {regret} of them again."
    )


def _new_engine(console: Console, path: Path) -> None:
    """The first engine is closed with all its memory; the second one has only the disk."""
    conversation = _new_conversation()
    with tempfile.TemporaryDirectory(prefix="everwarm-demo-") as states:
        store = StoreSettings(states, restore_policy="always")
        old = DemoClient.open(path, CheckpointParams(), store)
        with old.engine:
            for question in (f"My secret code is {SECRET}.", f"Here is a text.\n{story(120, seed=3)}"):
                old.reply(conversation, question)
        new = DemoClient.open(path, CheckpointParams(), store)
        with new.engine:
            turn = new.reply(conversation, "What is my secret code?")
    result = turn.result
    console.print(
        f"\n[bold]4. A new engine loads the conversation from disk:[/]\n   What is my secret code? {turn.text}\n"
        f"   {result.n_prompt:,} prompt tokens, {result.n_cached:,} of them from disk, {result.n_processed} processed."
    )


def _conclude(console: Console, warm: DemoClient, speed_up: float) -> None:
    report = warm.engine.call(compare_with_cold)
    regret = sum(turn.regret for turn in warm.turns)
    n_prompt = sum(turn.result.n_prompt for turn in warm.turns)
    n_read = sum(turn.result.n_processed for turn in warm.turns)
    console.print(
        f"\nregret:    {regret} of {n_prompt:,} prompt tokens were read again ({100 * regret / n_prompt:.2f} %)"
        f"\nbit-exact: {_verdict(report)}"
        f"\nreturning: the conversation that lost its slot was answered {speed_up:.1f}× sooner"
        f"\ndrafts:    {_tokens_per_decode(warm.turns):.2f} tokens of a reply per decode\n"
    )
    console.print(
        f"[bold]A server that keeps nothing would have read {n_prompt:,} tokens.\n"
        f"Everwarm read {n_read:,}, and all but {regret} of them for the first time.[/]\n"
    )


def _tokens_per_decode(turns: Iterable[Turn]) -> float:
    """An accepted draft saves the decode of a token."""
    n_written = sum(len(turn.result.tokens) for turn in turns)
    return n_written / max(1, n_written - sum(turn.result.n_draft_accepted for turn in turns))


def _verdict(report: ExactReport) -> str:
    if not report.n_compared:
        return "not compared (no checkpoint was made alone in the context)"
    if report.is_exact:
        return (
            f"yes: {report.n_compared} kept states equal a cold replay byte for byte,\n"
            f"           {report.n_controls} deliberately wrong ones all differ"
        )
    return f"NO ({report.n_different} of {report.n_compared} states differ, {report.n_controls_equal} controls equal)"


def _take_both_slots(client: DemoClient) -> None:
    for seed in (101, 102):
        client.say([{"role": "user", "content": f"Read this text: {story(120, seed=seed)}"}], max_tokens=8)


def _new_conversation() -> Messages:
    return [{"role": "system", "content": SYSTEM}]


def _short(text: str, width: int = 48) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[:width]}… ({len(text):,} characters)"


def show_images(console: Console) -> None:
    with tempfile.TemporaryDirectory(prefix="everwarm-demo-") as name:
        model = Path(name) / "vision.gguf"
        spec = TinySpec(arch="qwen35", vision=True)
        write_tiny(model, spec)
        write_tiny_projector(projector_path(model), spec)
        settings = EngineSettings(n_slots=1, n_ctx=2048, mmproj=str(projector_path(model)), ram_bytes=1 << 28)
        with Engine(model, settings) as engine:
            _show(console, engine)


def _show(console: Console, engine: Engine) -> None:
    table = Table(title="\n5. An image and turns about it (a tiny model with random weights)", title_justify="left")
    for name in ("turn", "prompt", "cached", "processed", "images encoded"):
        table.add_column(name, justify="left" if name == "turn" else "right")
    first = _gradient(0)
    other = _gradient(1)
    turns = (
        ("the image is shown", _SHOWN, first),
        ("the next question", _SHOWN + _NEXT, first),
        ("the same again", _SHOWN, first),
    )
    for title, text, image in (*turns, ("another image instead", _SHOWN, other)):
        result = _ask(engine, text, image)
        images = engine.core.images
        n_encoded = 0 if images is None else images.n_encoded
        table.add_row(title, *map(str, (result.n_prompt, result.n_cached, result.n_processed, n_encoded)))
    console.print(table)


def _ask(engine: Engine, text: str, image: m.SentImage) -> Result:
    assert engine.core.images is not None
    message = m.Submit(0, text=text, marker=_MARKER, images=(image,))
    prompt, _, pixels = image_prompt(engine.core.images, engine.tokenizer, message, text)
    return engine.submit(prompt, GREEDY, max_tokens=8, ignore_eos=True, images=pixels).result()


def _gradient(seed: int) -> m.SentImage:
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    rgb = np.stack([x % 256, y % 256, (x + y + 85 * seed) % 256], axis=-1).astype(np.uint8).tobytes()
    return m.SentImage(blake3.blake3(rgb).digest(), WIDTH, HEIGHT, rgb)


def story(n_sentences: int, *, seed: int) -> str:
    """Seeded filler text in the words that the embedded model knows, about eleven tokens a sentence."""
    pick = random.Random(seed).choice
    return " ".join(f"{pick(_NAMES)} found a {pick(_THINGS)} in {pick(_PLACES)}." for _ in range(n_sentences))
