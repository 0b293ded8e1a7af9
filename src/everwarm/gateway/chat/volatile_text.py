"""Where the text of a prompt is likely to change before it ever did: guesses for cuts, in characters.

*Volatile* text tells a moment or a place: dates, times, ids, folders, the state of a repository, counters. Clients put it
into the system prompt and the first message, and another request has other values there. *Joints* divide long messages:
files, sections, empty lines, elements of JSON, lines. An edited result often parts from the first one right behind one.

Pure: texts in, characters out, in linear time, few for each text. A wrong guess costs a checkpoint that is evicted first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from everwarm.gateway.chat.jinja_template import Layout

Message = Mapping[str, Any]

MAX_HEAD = 1 << 16  # characters of system text and of a first message that are searched
MAX_LONG = 1 << 18  # characters of messages that are searched for joints, the newest first
MIN_LONG = 1024  # characters: shorter messages have no joints
MAX_JOINTS = 128  # of one message, and of a prompt the newest
MIN_STEP = 128  # characters between joints

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?"
_DATE = (
    r"\b(?:19|20)\d\d[-/.]\d{1,2}[-/.]\d{1,2}"
    r"|\b\d{1,2}[-/.]\d{1,2}[-/.](?:19|20)\d\d\b"
    r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},"
    rf"|\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b|\b\d{{1,2}}\.? {_MONTH} (?:19|20)\d\d\b"
)
_TIME = r"(?<![\w.:/])\d{1,2}:\d\d(?::\d\d)?(?![\w:])|\b1[6-9]\d{8}(?:\d{3})?\b"
_ID = r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-|\b[a-z]{2,8}_[0-9A-Za-z]{16,64}\b|\b[0-9a-f]{24,64}\b"
_LABEL = (
    r"\b(?:On branch|HEAD is(?: now)? at) "
    r"|(?i:\b(?:cwd|pwd|directory|folder|work(?:space|tree)(?: root)?|project root|repository|git ?root|host(?:name)?"
    r"|user ?name|branch|head|status|commits?|session|open files?|visible files?|cursor)\b)"
    r"[ \t\"'*`]{0,3}[:=>][ \t\"'*`]{0,3}(?=[^\s<])"
)
_COUNTER = (
    r"(?i:\b(?:turn|step|message|request|iteration|attempt|run|day|build|tokens?|usage|used|left|remaining|count|budget)\b"
    r"[:=#]? {0,2})(?=#?\d)|\b(?=\d{1,7}%? (?:\w{1,12} ){0,2}(?:left|used|remaining|tokens)\b)"
)
_VALUES = re.compile(f"{_DATE}|{_TIME}|{_ID}")
_LABELS = re.compile(_LABEL)
_COUNTERS = re.compile(_COUNTER)
_HAS_VALUE, _HAS_LABEL = re.compile(r"\d|day,"), re.compile(r"[:=>]|branch|HEAD")  # quick: most lines have neither
MAX_VALUES, MAX_LABELS, MAX_COUNTERS = 6, 4, 3  # of one text: a few false ones must not use up the places of others
_FILES = re.compile(r"\n(?=(?:==> |=== |--- |\*\*\* |diff |# File|## |### |<file|<document|```))")
_ELEMENTS = re.compile(r"\n\n|[}\]],\s?(?=[{\[\n])")


def volatile_places(text: str) -> list[int]:
    """Where volatile text begins: at a value that shows what it is, or behind a label."""
    values = list[int]()
    labels = list[int]()
    counters = list[int]()
    at = 0
    for line in text[:MAX_HEAD].splitlines(keepends=True):
        if _HAS_VALUE.search(line):
            if len(values) < MAX_VALUES:
                values += [at + match.start() for match in _VALUES.finditer(line)]
            if len(counters) < MAX_COUNTERS:
                counters += [at + match.end() for match in _COUNTERS.finditer(line)]
        if len(labels) < MAX_LABELS and _HAS_LABEL.search(line):
            labels += [at + match.end() for match in _LABELS.finditer(line)]
        at += len(line)
    return sorted({*values[:MAX_VALUES], *labels[:MAX_LABELS], *counters[:MAX_COUNTERS]})


def joints(text: str, start: int, stop: int) -> Iterator[int]:
    """Where parts of a long message begin, about evenly spaced."""
    step = MIN_STEP
    while (stop - start) // step > MAX_JOINTS:
        step *= 2
    for low in range(start + step, stop - step // 2, step):
        high = min(low + step, stop)
        found = _FILES.search(text, low, high) or _ELEMENTS.search(text, low, high)
        at = text.find("\n", low, high) + 1 if found is None else found.end()
        if at > low:
            yield at


def places_in(layout: Layout, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The volatile places of a prompt, and the joints of its long messages."""
    volatile = [at + place for at, text in _heads(layout, messages) for place in volatile_places(text)]
    long: list[int] = []
    left = MAX_LONG
    for start, stop in reversed(list(_long_messages(layout, messages))):
        if left <= 0 or len(long) >= MAX_JOINTS:
            break
        left -= stop - start
        long += joints(layout.text, start, stop)
    return tuple(sorted(set(volatile))), tuple(sorted(set(long)))[-MAX_JOINTS:]


def _heads(layout: Layout, messages: Sequence[Message]) -> Iterator[tuple[int, str]]:
    """The texts that clients write around a conversation, and where they are in the prompt: system texts, and the first
    message after them."""
    at, left = 0, MAX_HEAD
    for message in messages:
        role = message.get("role")
        if role == "assistant" or left <= 0:
            return
        for text in _texts(message):
            found = layout.text.find(text[:left], at, at + MAX_HEAD + 2 * left)
            if found >= 0:
                yield found, text[:left]
                at = found
            left -= len(text)
        if role == "user":
            return


def _texts(message: Message) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _long_messages(layout: Layout, messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """Where they begin and end in the prompt. What a model wrote is not edited."""
    if layout.end is None:
        return
    if layout.starts[0][0] > 0:  # the template writes the system prompt and tools before its loop
        yield 0, layout.starts[0][1]
    stops = [*(start for _, start in layout.starts[1:]), layout.end]
    for (i, start), stop in zip(layout.starts, stops, strict=True):
        if stop - start >= MIN_LONG and messages[i].get("role") != "assistant":
            yield start, stop
