"""A model's own Jinja template as a function from messages to text, which also records where each message begins.

The template comes with the model file, so it is untrusted: it runs in Jinja's sandbox, which does not let it change its
arguments. Nothing in it is random, and the time is an argument. Knows no cuts and no tokens.
"""

from __future__ import annotations

import copy
import datetime
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from everwarm.errors import BadRequest
from everwarm.gateway.chat.content import Message
from everwarm.gateway.chat.message_forms import MessageForms

MAX_PROMPT_CHARS = 8 << 20  # of one text
_MANY_VALUES = 5_000  # more are not encoded by the library's fast encoder, which holds the GIL
_TRACE = "everwarm_trace"  # the name under which a template finds the recorder of its own loops


def now() -> datetime.datetime:
    """The time that templates see."""
    return datetime.datetime.now()


def _too_long() -> BadRequest:
    return BadRequest(
        f"the chat template renders this conversation to more than {MAX_PROMPT_CHARS:,} characters: "
        "shorten it, or its tools"
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered text. ``starts`` are (message, character), ascending, from the loops that wrote the messages, and ``end``
    is where these loops ended; without such loops there are none."""

    text: str
    starts: tuple[tuple[int, int], ...] = ()
    end: int | None = None


@dataclass(slots=True)
class Given:
    """The arguments of a template besides the messages, for all renders of one request. JSON texts of tools are cached."""

    tools: Sequence[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    now: datetime.datetime = field(default_factory=lambda: now())
    json_texts: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Given:
        return Given(tools, self.kwargs, self.now)

    @property
    def later(self) -> Given:
        """The arguments of the next request: the same day, another time of day."""
        step = datetime.timedelta(hours=1, minutes=1, seconds=1)
        then = self.now + step if (self.now + step).date() == self.now.date() else self.now - step
        return Given(self.tools, self.kwargs, then, self.json_texts)


class Template:
    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self.source = source
        self._globals = {"bos_token": bos, "eos_token": eos}
        self._changes_things = False
        self.forms = MessageForms(source, self._small_text)
        try:
            self._frozen = _compiled(_Frozen, source)
        except jinja2.TemplateError as error:
            raise BadRequest(f"the chat template cannot be parsed: {error}") from None

    def lay_out(self, messages: Sequence[Message], given: Given, *, add_generation_prompt: bool = True) -> Layout:
        """The text for messages in the form the template takes; what it raises becomes ``BadRequest``."""
        try:
            return self._lay_out(messages, given, add_generation_prompt)
        except BadRequest:  # the text is too long
            raise
        except Exception as error:  # noqa: BLE001 - an error of a template is no error of the server
            raise BadRequest(f"the chat template refused the messages: {error or type(error).__name__}") from None

    def _lay_out(self, messages: Sequence[Message], given: Given, add_generation_prompt: bool) -> Layout:
        values = {
            **self._globals,
            "date_string": given.now.strftime("%d %b %Y"),
            "datetime": given.now.strftime("%b %d %Y"),
            **given.kwargs,
            "messages": messages if isinstance(messages, list) else list(messages),
            "strftime_now": given.now.strftime,
            **({"tools": given.tools} if given.tools else {}),
            **({"add_generation_prompt": True} if add_generation_prompt else {}),
        }
        if not self._changes_things:
            try:
                return _written(self._frozen, values, given)
            except jinja2.exceptions.SecurityError:
                pass
        layout = _written(self._loose, copy.deepcopy(values), Given(None, {}, given.now))
        self._changes_things = True
        return layout

    def _small_text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, enable_thinking: bool = True
    ) -> str:
        return self._lay_out(messages, Given(None, {"enable_thinking": enable_thinking}), add_generation_prompt).text

    @functools.cached_property
    def _loose(self) -> jinja2.Template:
        """The template without a ban on changes, for the few that change lists and objects: they get copies."""
        return _compiled(_Environment, self.source)


# rendering


class _Trace:
    """Where the output was when a loop came to a message. A template may call it itself: that changes hints only."""

    __slots__ = ("_index", "_messages", "ends", "given", "keeps", "loops", "pieces")

    def __init__(self, messages: Sequence[Message], given: Given) -> None:
        self._messages = messages
        self._index = {id(message): i for i, message in reversed(list(enumerate(messages)))}
        self.keeps = {id(shown) for tool in given.tools or () for shown in (tool, tool.get("function"))}
        self.given = given
        self.loops: dict[int, list[tuple[int, int]]] = {}
        self.ends: dict[int, int] = {}
        self.pieces: list[str] = []  # of the text written so far

    def __call__(self, loop: Any, *items: Any) -> None:
        if not items:
            self.ends[loop] = len(self.pieces)
        elif (index := self._index.get(id(items[0]))) is not None:
            starts = self.loops.setdefault(loop, [])
            after = starts[-1][0] + 1 if starts else 0
            if index < after < len(self._messages) and self._messages[after] is items[0]:
                index = after  # the same object again
            starts.append((index, len(self.pieces)))

    def layout(self) -> Layout:
        """From the loops that wrote text, if they visited the messages once and in order."""
        text = "".join(self.pieces)
        wrote = [loop for loop, starts in self.loops.items() if self.ends.get(loop, 0) > starts[0][1]]
        starts = [start for loop in wrote for start in self.loops[loop]]
        if not starts or any(b[0] <= a[0] or b[1] < a[1] for a, b in itertools.pairwise(starts)):
            return Layout(text)
        at = [0, *itertools.accumulate(map(len, self.pieces))]
        return Layout(text, tuple((i, at[n]) for i, n in starts), at[self.ends[wrote[-1]]])


def _written(template: jinja2.Template, values: dict[str, Any], given: Given) -> Layout:
    trace = _Trace(values["messages"], given)
    write, n_chars = trace.pieces.append, 0
    for piece in template.root_render_func(template.new_context({**values, _TRACE: trace})):
        write(piece)
        n_chars += len(piece)
        if n_chars > MAX_PROMPT_CHARS:
            raise _too_long()
    return trace.layout()


def _compiled(kind: type[_Environment], source: str) -> jinja2.Template:
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    env = kind(trim_blocks=True, lstrip_blocks=True, extensions=extensions, undefined=_Undefined)
    env.filters["tojson"] = _tojson
    env.filters["random"] = _first
    env.filters["safe"] = str  # nothing is escaped, so nothing has to be marked as safe
    env.globals["raise_exception"] = _raise
    del env.globals["lipsum"]
    tree = env.parse(source)
    numbers = itertools.count()
    tree.body = _traced(tree.body, numbers)
    code = env.compile(tree)
    return jinja2.Template.from_code(env, code, env.make_globals(None))


_BUFFERED = (jinja2.nodes.Macro, jinja2.nodes.CallBlock, jinja2.nodes.FilterBlock, jinja2.nodes.AssignBlock)


def _traced(body: list[jinja2.nodes.Node], numbers: itertools.count[int]) -> list[jinja2.nodes.Node]:
    """Statements in which every loop that writes directly to the output records each item, and its own end."""
    found: list[jinja2.nodes.Node] = []
    for node in body:
        found.append(node)
        if isinstance(node, _BUFFERED) or (isinstance(node, jinja2.nodes.For) and node.recursive):
            continue
        for name in ("body", "elif_", "else_"):
            if isinstance(getattr(node, name, None), list):
                setattr(node, name, _traced(getattr(node, name), numbers))
        if isinstance(node, jinja2.nodes.For) and isinstance(node.target, jinja2.nodes.Name):
            number = next(numbers)
            node.body.insert(0, _says(number, jinja2.nodes.Name(node.target.name, "load")))
            found.append(_says(number))
    return found


def _says(number: int, *items: jinja2.nodes.Expr) -> jinja2.nodes.Node:
    arguments = [jinja2.nodes.Const(number), *items]
    call = jinja2.nodes.Call(jinja2.nodes.Name(_TRACE, "load"), arguments, [], None, None)
    return jinja2.nodes.ExprStmt(call).set_lineno(1)


# the environment


class _Undefined(jinja2.Undefined):
    """Adding an undefined value to a text gives the text, as in llama-server."""

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str) else super().__add__(other)

    __radd__ = __add__


_OF_DICTS = frozenset(dir(dict))


class _Environment(jinja2.sandbox.SandboxedEnvironment):
    """The sandbox, with a fast path for what templates do most. It allows and returns the same."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _OF_DICTS:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind in (jinja2.runtime.LoopContext, jinja2.utils.Namespace) and attribute[0] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        kind = type(__obj)
        if kind is _Trace:
            return __obj(*args)
        if kind is jinja2.runtime.Macro:
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Frozen(_Environment, jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox lets nothing be changed, so nothing has to be copied."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what a model writes; for a prompt its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way of declaring tags

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context, value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any
) -> str:
    """Templates want plain JSON, not JSON escaped for HTML. A tool is encoded once for all renders of a request."""
    trace = context.get(_TRACE)
    if type(trace) is not _Trace or id(value) not in trace.keeps:
        return _json_text(value, ensure_ascii, indent)
    key = (id(value), ensure_ascii, indent)
    if key not in trace.given.json_texts:
        trace.given.json_texts[key] = _json_text(value, ensure_ascii, indent)
    return trace.given.json_texts[key]


def _json_text(value: Any, ensure_ascii: bool, indent: int | None) -> str:
    """Up to ``MAX_PROMPT_CHARS``: indenting deeply nested values makes them far longer."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, default=list)
    if indent is None and not _has_many_values(value):
        return encoder.encode(value)
    texts, n_chars, pieces = [], 0, encoder.iterencode(value)
    while text := "".join(itertools.islice(pieces, 4096)):
        texts.append(text)
        n_chars += len(text)
        if n_chars > MAX_PROMPT_CHARS:
            raise _too_long()
    return "".join(texts)


def _has_many_values(value: Any) -> bool:
    todo, n_values = [value], 0
    while todo and n_values <= _MANY_VALUES:
        inner = todo.pop()
        if isinstance(inner, dict | list):
            n_values += len(inner)
            todo += inner.values() if isinstance(inner, dict) else inner
    return n_values > _MANY_VALUES


def _first(values: Sequence[Any]) -> Any:
    """Replaces random choice: a prompt that changes every time could never be reused."""
    return next(iter(values))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
