"""Tool calls found in replies while they are written: in every format, however cut, and never at the price of text."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everwarm.gateway.parsing.reasoning import Reasoning, ReasoningParser, ReasoningStyle
from everwarm.gateway.parsing.tool_parser import (
    TOOL_FORMATS,
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    Text,
    ToolParser,
    detect_tools,
    settled,
)
from support.pieces import cut

FORMATS = sorted(TOOL_FORMATS)
PROPERTIES = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "l": {"type": "array", "items": {"type": "string"}},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "unit": {"enum": ["C", "F"]},
    "point": {"$ref": "#/$defs/point"},
    "odd": 7,
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"point": {"properties": {"x": {}}}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}, {"name": "g"}, {"type": "function"}]
# pieces, with ¦ between them
VOCABULARY = {
    "hermes": '<tool_call>¦</tool_call>¦<|tool_call|>¦{"name": "f", "arguments": {¦"s": "¦"n": 12¦}}',
    "qwen-xml": "<tool_call>¦</tool_call>¦<function=f>¦<parameter=s>¦<parameter=n>¦</parameter>¦</function>",
    "jamba": '<tool_calls>[¦<tool_calls>¦]</tool_calls>¦{"name": "f", "parameters": ¦{"s": "¦{}¦}¦, ',
    "nemotron": '<TOOLCALL>[¦</TOOLCALL>¦{"arguments": {"n": 1}, ¦"name": "f"}¦{"name": "g"}¦,¦]',
    "pythonic": "<|tool_call_start|>[¦<|tool_call_end|>¦f(¦s='¦s=\"¦n=3¦'¦\"¦o={¦)¦, ¦]",
}
COMMON = "<¦>¦{¦}¦[¦]¦\"¦'¦\\¦\\u00¦\\u00e9¦,¦:¦ ¦\n¦\n\n¦\t¦a¦é🙂¦tru¦-1¦null¦</¦"


def numbered():
    count = itertools.count()
    return lambda: f"call_{next(count)}"


def merged(events: Iterable[Event]) -> list[Event]:
    done: list[Event] = []
    for event in events:
        last = done[-1] if done else None
        if isinstance(event, Text):
            assert event.text, "an empty event says nothing"
            if isinstance(last, Text):
                done[-1] = Text(last.text + event.text)
                continue
        if isinstance(event, CallArguments) and isinstance(last, CallArguments):
            done[-1] = CallArguments(event.index, last.json_fragment + event.json_fragment)
            continue
        done.append(event)
    return done


def parsed(format: str, pieces: Sequence[str], kind=ToolParser, tools: Any = TOOLS) -> list[Event]:
    parser = kind(format, tools, new_id=numbered())
    return merged([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def told(format: str, reply: str, tools: Any = TOOLS) -> list[Any]:
    """Text as it is, complete calls as (name, arguments), broken ones as (name, arguments so far, "broken")."""
    done: list[Any] = []
    for event in parsed(format, [reply], tools=tools):
        match event:
            case Text():
                done.append(event.text)
            case CallBegun():
                done.append((event.name, ""))
            case CallArguments():
                done[-1] = (done[-1][0], event.json_fragment)
            case CallEnded():
                name, arguments = done[-1]
                done[-1] = (name, json.loads(arguments)) if event.complete else (name, arguments, "broken")
    assert parsed(format, list(reply), tools=tools) == parsed(format, [reply], tools=tools)
    return done


def check(events: list[Event], reply: str) -> None:
    """The events are in order, complete calls are JSON objects, and every character is in a text or in a call."""
    index, begun, arguments, written = -1, False, "", ""
    for event in events:
        match event:
            case Text():
                assert not begun
                written += event.text
            case CallBegun():
                assert not begun and event.index == index + 1 and event.id == f"call_{event.index}"
                index, begun, arguments = event.index, True, ""
            case CallArguments():
                assert begun and event.index == index
                arguments += event.json_fragment
            case CallEnded():
                assert begun and event.index == index
                assert not event.complete or isinstance(json.loads(arguments), dict)
                arguments.encode()
                written += event.raw
                begun = False
    assert not begun
    assert written == reply or (isinstance(events[-1], CallEnded) and written == reply.rstrip())


SAMPLES = {
    "hermes": [
        '\n<tool_call>\n{"name": "f", "arguments": {"s": "a\\n\\u00e9 <b>", "n": [1, -2.5e3, {}]}}\n</tool_call>\n',
        '<|tool_call|>[{"arguments": {"b": true}, "name": "f"}, {"name": "g"}] and',
        '<tool_call>{"name": "f", "parameters": "{\\"n\\": null}"}</tool_call>',
    ],
    "qwen-xml": [
        "<tool_call>\n<function=f>\n<parameter=s>\na </b>\n\n</parameter>\n<parameter=o>\n{'a': [1]}</parameter>"
        "</function>\n</tool_call>",
        "Oh <function=f><parameter=n>12</parameter><parameter=maybe>null</parameter></function> and",
        '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>',
    ],
    "jamba": [
        '<tool_calls>[\n{"name": "f", "arguments": {"s": "x", "l": []}},\n{"name": "g"}\n]</tool_calls>',
        'Oh <tool_calls>\n{"name": "f"}\n{"name": "g", "arguments": {}}\n</tool_calls> and',
    ],
    "nemotron": [
        '<TOOLCALL>[{"name": "f", "arguments": {"s": "x\\"y"}}, {"arguments": {"n": 1.5}, "name": "g"}]</TOOLCALL>',
        'Oh <TOOLCALL>{"name": "f", "arguments": {"a": {"b": [null, false]}}}</TOOLCALL> and',
    ],
    "pythonic": [
        "<|tool_call_start|>[f(s='it's \\x41\\n', n=3), g(), h(new=\"a, b\", o={'a': (1, None)})]<|tool_call_end|> and",
        "Oh <|tool_call_start|>f(n='3', l=[\"x\", 'y'], b=True,)<|tool_call_end|>",
        '<|tool_call_start|>[{"name": "f", "arguments": {"n": 1}}]<|tool_call_end|>',
    ],
}


@st.composite
def damaged(draw: st.DrawFn, format: str) -> str:
    """A good reply with a stretch of it replaced, mostly by something else that belongs to the format."""
    reply = draw(st.sampled_from(SAMPLES[format]))
    at, n_gone = draw(st.integers(0, len(reply))), draw(st.integers(0, 12))
    return reply[:at] + draw(piece(format)) + reply[at + n_gone :]


def piece(format: str) -> st.SearchStrategy[str]:
    tags = VOCABULARY[format].split("¦")
    pieces = [*tags * 4, *(tag[:-1] for tag in tags), *(tag[: len(tag) // 2] for tag in tags), *COMMON.split("¦")]
    return st.sampled_from(pieces) | st.text(max_size=3)


def replies(format: str) -> st.SearchStrategy[str]:
    """Good calls, damaged ones, and a format's tags and their pieces among JSON's, Python's and people's characters."""
    part = st.sampled_from(SAMPLES[format]) | damaged(format) | st.lists(piece(format), max_size=12).map("".join)
    return st.lists(part, max_size=3).map("".join)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["f", "get_time", "a.b-c"]), st.dictionaries(st.text("ab_é", min_size=1), JSON, max_size=3)
    ),
    min_size=1,
    max_size=2,
)


# every format


@pytest.mark.parametrize(
    ("format", "reply", "expected"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>', [("f", {"n": 1})]),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}', [("f", {})]),
        ("hermes", '<tool_call>{"name": "g"}</tool_call>', [("g", {})]),
        ("hermes", '<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', [("f", {"n": 1})]),
        (
            "hermes",
            '<tool_call>{"id": [1], "name": "f", "parameters": {"s": "a\nb\\d"}}</tool_call>',
            [("f", {"s": "a\nb\\d"})],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', [("f", {"n": 1})]),
        ("hermes", '<|tool_call|>[{"name": "f", "arguments": {"n": 1}}, {"name": "g"}]', [("f", {"n": 1}), ("g", {})]),
        (
            "hermes",
            'One.\n\n<tool_call>{"name": "g"}</tool_call>\n<tool_call>{"name": "f"}</tool_call> Two.\n',
            ["One.", ("g", {}), ("f", {}), " Two.\n"],
        ),
        (
            "qwen-xml",
            "Yes.\n\n<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
            "<parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{'a': [None, 1]}\n</parameter>\n"
            "<parameter=new>\n5\n</parameter>\n</function>\n</tool_call>",
            ["Yes.", ("f", {"s": "12", "n": 12, "b": True, "o": {"a": [None, 1]}, "new": "5"})],
        ),
        ("qwen-xml", "<tool_call>\n<function=g>\n</function>\n</tool_call>", [("g", {})]),
        (
            "qwen-xml",
            "<function=f>\n<parameter=s>\n\na<b\n\n</parameter>\n</function>\n</tool_call>",
            [("f", {"s": "\na<b\n"})],
        ),
        (
            "qwen-xml",
            "<function=f><parameter=s></parameter><parameter=n>x</parameter></function>",
            [("f", {"s": "", "n": "x"})],
        ),
        (
            "qwen-xml",
            "<function=f><parameter=maybe>null</parameter><parameter=unit>C</parameter><parameter=point>{}</parameter></function>",
            [("f", {"maybe": None, "unit": "C", "point": {}})],
        ),
        ("qwen-xml", '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>', [("f", {"n": 1})]),
        (
            "jamba",
            '<tool_calls>[\n  {"name": "f", "arguments": {"n": 1}},\n  {"name": "g"}\n]</tool_calls>',
            [("f", {"n": 1}), ("g", {})],
        ),
        ("jamba", '<tool_calls>\n{"name": "f"}\n{"name": "g"}\n</tool_calls>', [("f", {}), ("g", {})]),
        ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {"s": "é\\u00e9"}}]</TOOLCALL>', [("f", {"s": "éé"})]),
        ("pythonic", '<|tool_call_start|>[f(s="v", n=3)]<|tool_call_end|>', [("f", {"s": "v", "n": 3})]),
        (
            "pythonic",
            "<|tool_call_start|>[f(s='it's', b=True, o={'a': (1, None)}, l=['x',],), g()]<|tool_call_end|>Done.",
            [("f", {"s": "it's", "b": True, "o": {"a": [1, None]}, "l": ["x"]}), ("g", {}), "Done."],
        ),
        (
            "pythonic",
            "<|tool_call_start|>[f(s=3, n='3', x=.5, new=02139, zip=-0x10, word=Paris)]",
            [("f", {"s": "3", "n": 3, "x": 0.5, "new": "02139", "zip": -16, "word": "Paris"})],
        ),
        ("pythonic", "<|tool_call_start|>f(s='\\x41\\n\\'\\u00e9\\q')<|tool_call_end|>", [("f", {"s": "A\n'é\\q"})]),
        ("pythonic", '<|tool_call_start|>[{"name": "f", "arguments": {"n": 1}}]<|tool_call_end|>', [("f", {"n": 1})]),
    ],
)
def test_calls_are_found(format, reply, expected):
    assert told(format, reply) == expected


@pytest.mark.parametrize(
    ("format", "reply"),
    [
        ("hermes", "<tool_call>not JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"'),
        ("hermes", "The tag is <tool_call>, and it ends with </tool_call>. \n"),
        ("hermes", "  <tool_ca"),
        ("qwen-xml", "<tool_call>\n<function=two words>\n</function>\n</tool_call>"),
        ("qwen-xml", "Write <function=name> and then more."),
        ("jamba", "<tool_calls>[]</tool_calls>"),
        ("pythonic", '<|tool_call_start|>[f("positional")]<|tool_call_end|>'),
        ("pythonic", "<|tool_call_start|>[]<|tool_call_end|>"),
    ],
)
def test_what_is_no_call_is_text(format, reply):
    assert told(format, reply) == [reply]


@pytest.mark.parametrize(
    ("format", "reply", "expected"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"b": tru}}</tool_call>',
            [("f", '{"b": ', "broken"), "tru}}</tool_call>"],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "half of it', [("f", '{"s": "half of it', "broken")]),
        (
            "jamba",
            '<tool_calls>[{"name": "f"}, oh no, <tool_calls>[{"name": "g"}]</tool_calls>',
            [("f", {}), " oh no,", ("g", {})],
        ),
        ("qwen-xml", "<function=f><parameter=n>12</para", [("f", "", "broken"), "n>12</para"]),
        ("pythonic", "<|tool_call_start|>[f(n=3 4)]", [("f", '{"n": 3', "broken"), " 4)]"]),
        ("pythonic", "<|tool_call_start|>[f(n=3)) and", [("f", {"n": 3}), ") and"]),
    ],
)
def test_a_call_that_goes_wrong_keeps_what_was_said_and_the_rest_is_text(format, reply, expected):
    assert told(format, reply) == expected


def test_a_reply_that_is_all_there_has_no_broken_calls():
    reply = '<tool_calls>[{"name": "f"}, {"name": "g", "arguments": {"x": tru}}]</tool_calls>'
    events = merged(settled(parsed("jamba", [reply + ' <tool_calls>{"name": "g"}</tool_calls>'])))
    assert [event.index for event in events if isinstance(event, CallBegun)] == [0, 1]
    assert Text(' {"name": "g", "arguments": {"x": tru}}]</tool_calls>') in events
    assert all(event.complete for event in events if isinstance(event, CallEnded))


def test_arguments_come_as_they_are_written():
    parser = ToolParser("hermes", TOOLS, new_id=numbered())
    pieces = [
        "Hm",
        " <tool",
        "_call>",
        '{"name": "',
        'f", "argu',
        'ments": {"',
        's": "a',
        "b\\",
        'n", "n": 1',
        "2}}",
        "</tool_",
        "call>",
    ]
    assert [parser.feed(piece) for piece in pieces] == [
        [Text("Hm")],
        [],
        [],
        [],
        [],
        [CallBegun(0, "call_0", "f"), CallArguments(0, '{"')],
        [CallArguments(0, 's": "a')],
        [CallArguments(0, "b")],
        [CallArguments(0, '\\n", "n": ')],
        [CallArguments(0, "12}")],
        [],
        [CallEnded(0, ' <tool_call>{"name": "f", "arguments": {"s": "ab\\n", "n": 12}}</tool_call>')],
    ]
    assert parser.finish() == []


def test_json_arguments_are_spelled_as_the_model_spelled_them():
    spelled = '{ "n":1 ,\n"l": [ ],  "o": {"a" : "\\/"}}'
    events = parsed("hermes", [f'<tool_call>{{"name": "f", "arguments": {spelled}}}</tool_call>'])
    assert CallArguments(0, spelled) in events


def test_ids_are_random_unless_given():
    ids = [ToolParser("hermes").feed('<tool_call>{"name": "f"}')[0].id for _ in range(2)]  # type: ignore[union-attr]
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", id) for id in ids) and ids[0] != ids[1]


def test_a_call_inside_reasoning_is_part_of_the_thought():
    call = '<tool_call>{"name": "g"}</tool_call>'
    reasoning, tools = ReasoningParser(ReasoningStyle("<think>", "</think>")), ToolParser("hermes", TOOLS)
    events = reasoning.feed(f"<think>{call}</think>{call}") + reasoning.finish()
    assert events == [Reasoning(call), Text(call)]
    assert len([e for e in tools.feed(events[1].text) + tools.finish() if isinstance(e, CallBegun)]) == 1


@pytest.mark.parametrize("format", ["hermes", "jamba", "nemotron", "pythonic"])
@settings(max_examples=15, deadline=None)
@given(calls=CALLS, indent=st.sampled_from([None, 1]), ascii=st.booleans())
def test_what_json_can_say_arrives(format, calls, indent, ascii):
    written = [json.dumps({"name": n, "arguments": a}, indent=indent, ensure_ascii=ascii) for n, a in calls]
    opener, closer = next(iter(TOOL_FORMATS[format].tags.items()))
    assert told(format, f"{opener}[{', '.join(written)}]{closer}") == calls


@settings(max_examples=20, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.just("f"), st.dictionaries(st.sampled_from("abc"), JSON, max_size=3)), min_size=1, max_size=2
    )
)
def test_what_python_can_say_arrives(calls):
    assume(
        not any(message.get("b") in ("true", "false", "True", "False") for _, message in calls)
    )  # ``b`` is a boolean
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in message.items())})" for name, message in calls]
    assert told("pythonic", f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>") == calls


@pytest.mark.parametrize(
    ("written", "arrives"), [("'true'", True), ("'False'", False), ("'0'", "0"), ("'5'", "5"), ("'yes'", "yes")]
)
def test_a_text_is_taken_for_another_type_only_where_it_spells_one(written, arrives):
    assert told("pythonic", f"<|tool_call_start|>[f(b={written})]<|tool_call_end|>") == [("f", {"b": arrives})]


# any cutting, any text


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_in_any_cutting_gives_the_same_and_loses_nothing(format, data):
    reply = data.draw(replies(format))
    whole = parsed(format, [reply])
    check(whole, reply)
    assert parsed(format, cut(reply, data.draw(st.lists(st.integers(0, 9), max_size=30)))) == whole
    assert parsed(format, list(reply)) == whole


class Impatient(ToolParser):
    """Broken: says the beginning of a tag."""

    def _n_certain(self):
        return len(self._reader.text)


class Forgetful(ToolParser):
    """Broken: does not say what it held back."""

    def finish(self):
        super().finish()
        return []


class Dropping(ToolParser):
    """Broken: what turns out to be no call is gone."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._reader.give_up = lambda: self._reader._raw.clear()


def test_broken_parsers_would_be_caught():
    call = '<tool_call>{"name": "g"}</tool_call>'
    assert parsed("hermes", list(call), Impatient) != parsed("hermes", [call], Impatient)
    for broken in (Forgetful, Dropping):
        reply = "a <tool_call>b" if broken is Dropping else "a <tool"
        check(parsed("hermes", [reply]), reply)
        with pytest.raises(AssertionError):
            check(parsed("hermes", [reply], broken), reply)


@pytest.mark.parametrize("format", FORMATS)
def test_the_fuzz_reaches_complete_and_broken_calls(format):
    """A vocabulary that never makes a call would prove nothing."""
    seen = set()

    @settings(max_examples=120, deadline=None, database=None, derandomize=True)
    @given(reply=replies(format))
    def look(reply):
        seen.update(event.complete for event in parsed(format, [reply]) if isinstance(event, CallEnded))

    look()
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("format", "reply"),
    [
        ("hermes", "<tool_call>" * 20_000),
        ("hermes", " " * 100_000 + "<"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"l": [' + "1, " * 30_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 50_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"n": ' + "1" * 100_000),
        ("qwen-xml", "<function=f><parameter=n>" + "</param" * 30_000),
        ("pythonic", "<|tool_call_start|>[f(n=" + "[" * 100_000),
        ("pythonic", "<|tool_call_start|>[f(n=" + "{" * 100_000),
        ("pythonic", "<|tool_call_start|>[f(s='" + "' " * 30_000),
    ],
)
def test_long_nonsense_takes_linear_time(format, reply):
    begun = time.thread_time()
    check(parsed(format, [reply]), reply)
    check(parsed(format, cut(reply, [8] * (len(reply) // 8))), reply)
    assert time.thread_time() - begun < 5


# detection and schemas


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ('…<tool_call>\n{"name": …', "hermes"),
        ("respond only with <|tool_call|> followed by a JSON list", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=p>", "qwen-xml"),
        ("<tool_calls>[", "jamba"),
        ("<TOOLCALL>[", "nemotron"),
        ("List of tools: <|tool_list_start|>[", "pythonic"),
        ("List of tools: [", "pythonic"),
        ("<tool_call>name<arg_key>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_known_from_the_template(template, expected):
    assert detect_tools(template) == expected


def test_the_embedded_model_writes_hermes(embedded_model):
    assert detect_tools(embedded_model.chat_template) == "hermes"


@pytest.mark.parametrize("tools", [[], [{}], [{"function": 3}], [{"name": "f", "parameters": {"properties": [1]}}]])
def test_odd_tools_are_tools_without_schemas(tools):
    assert told("qwen-xml", "<function=f><parameter=n>1</parameter></function>", tools) == [("f", {"n": "1"})]


def test_a_schema_that_refers_to_itself_ends():
    tools = [{"name": "f", "parameters": {"properties": {"n": {"$ref": "#/properties/n"}}}}]
    assert told("qwen-xml", "<function=f><parameter=n>1</parameter></function>", tools) == [("f", {"n": "1"})]
