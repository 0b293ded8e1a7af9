"""Replies that come back in later requests, recognised however the client writes them.

A client sends a reply back as it understood it: JSON with other white space, escapes or numbers, text without the blanks
around it, several calls as a list. Rendered like that, a prompt leaves what the engine knows inside the reply, and all
after it is read again. So what the model wrote is remembered, and takes the place of a message that says the same. A
message that says anything else stays as the client sent it.

Pure: what is remembered comes in as a value, and ``stores`` keeps it. The template is passed in as a function.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from everwarm.gateway.chat.content import breakpoint_in, parts_as_text
from everwarm.gateway.chat.stable_points import Render, common_prefix, results_of
from everwarm.types import Json

MAX_REPLY_CHARS = 1 << 20  # longer replies are not remembered
_OUR_ID = re.compile(r"call_[0-9a-f]{24}")
_QUESTION = {"role": "user", "content": "So?"}
_SIGN = "\ue0d5\ue1ff"  # private characters: no text has them by chance


class RememberedCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str  # JSON in the model's spelling


class RememberedReply(msgspec.Struct, frozen=True):
    """What a model wrote. ``as_text``: content and calls in one text, where the template would write the calls in another
    way than the model; ``spaced_reasoning``: with the white space around it, where the template adds none."""

    content: str
    calls: tuple[RememberedCall, ...] = ()
    reasoning: str = ""
    as_text: str | None = None
    spaced_reasoning: str | None = None

    def message(self, *, with_reasoning: bool) -> Json:
        """The message that the template renders as the model wrote it."""
        message: Json = {"role": "assistant", "content": self.content if self.as_text is None else self.as_text}
        if with_reasoning and self.reasoning:
            message["reasoning_content"] = self.spaced_reasoning or self.reasoning
        if self.calls and self.as_text is None:
            message |= {"content": self.content or None, "tool_calls": [_call(call) for call in self.calls]}
        return message


Remembered = Mapping[int, Sequence[RememberedReply]]  # by the place of a message: what it may be


def restored(messages: Sequence[Json], remembered: Remembered) -> list[Json]:
    """The messages as the model wrote them. The last one is never changed: a client may want it continued."""
    changed = {
        i: _as_written(messages[i], replies)
        for i, replies in remembered.items()
        if 0 <= i < len(messages) - 1 and replies
    }
    return [changed.get(i, message) for i, message in enumerate(messages)]


def _as_written(message: Json, replies: Sequence[RememberedReply]) -> Json:
    for reply in replies:
        if _says_the_same(message, reply):
            return _with_written(message, reply)
    known = {call.id: call for reply in replies for call in reply.calls}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_as_written(call, known) for call in calls]}


def _says_the_same(message: Json, reply: RememberedReply) -> bool:
    calls = message.get("tool_calls") or []
    if _text(message.get("content")).strip() != reply.content.strip() or not isinstance(calls, list):
        return False
    return len(calls) == len(reply.calls) and all(map(_is_same_call, calls, reply.calls))


def _with_written(message: Json, reply: RememberedReply) -> Json:
    """Thinking that the client left out or changed stays left out or changed; ids are the client's."""
    thought = message.get("reasoning_content")
    same_thought = isinstance(thought, str) and bool(thought) and thought.strip() == reply.reasoning.strip()
    written = reply.message(with_reasoning=same_thought)
    kept = {key: value for key, value in message.items() if key != "tool_calls" and key not in written}
    if "tool_calls" in written:
        pairs = zip(message["tool_calls"], written["tool_calls"], strict=True)
        written["tool_calls"] = [_spelled(given, own["function"]["arguments"]) for given, own in pairs]
    content = message.get("content")
    if _text(content) == _text(written["content"]):
        return {**kept, **written, "content": content}
    marks = [breakpoint_in(part) for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return {**kept, **written, **{key: value for mark in marks for key, value in mark.items()}}


def _call_as_written(call: Any, known: Mapping[str, RememberedCall]) -> Any:
    own = known.get(call.get("id", "")) if isinstance(call, dict) and isinstance(call.get("id"), str) else None
    return _spelled(call, own.arguments) if own is not None and _is_same_call(call, own) else call


def _is_same_call(call: Any, own: RememberedCall) -> bool:
    name, arguments = _name_and_arguments(call)
    if name != own.name or arguments is None:
        return False
    if arguments == own.arguments:
        return True
    canonical = canonical_json(arguments)
    return canonical is not None and canonical == canonical_json(own.arguments)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return str(parts_as_text({}, content)["content"])
    return content if isinstance(content, str) else ""


def _spelled(call: Json, arguments: str) -> Json:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _call(call: RememberedCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _name_and_arguments(call: Any) -> tuple[str, str | None]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "", None
    arguments = function.get("arguments")
    return str(function.get("name")), arguments if isinstance(arguments, str) else None


def canonical_json(text: str) -> str | None:
    """One spelling for equal values: the same keys in the same order; 1 is not 1.0. None: it is no such JSON."""
    try:
        return json.dumps(json.loads(text, object_pairs_hook=_object, parse_constant=_no_number), ensure_ascii=True)
    except (ValueError, RecursionError):
        return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _no_number(name: str) -> None:
    raise ValueError(name)


# under which keys a reply is remembered


def keys_of(messages: Sequence[Json]) -> dict[int, list[str]]:
    """The keys under which each message of an assistant may be remembered."""
    return {
        i: list(_keys(message, messages[i - 1] if i else None))
        for i, message in enumerate(messages[:-1])
        if message.get("role") == "assistant"
    }


def keys_of_reply(reply: RememberedReply, question: Json | None) -> list[str]:
    """``question``: the message that it answers."""
    calls = [(call.name, call.arguments) for call in reply.calls]
    return [*(f"call {call.id}" for call in reply.calls), *_text_key(question, reply.content, calls)]


def _keys(message: Json, before: Json | None) -> Iterator[str]:
    """The ids of its calls; of a message without such ids, the text and what it answers."""
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    ids = [call["id"] for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str)]
    ours = [id for id in ids if _OUR_ID.fullmatch(id)]
    yield from (f"call {id}" for id in ours)
    if not ours:
        named = [_name_and_arguments(call) for call in calls]
        yield from _text_key(before, _text(message.get("content")), [(name, text or "") for name, text in named])


def _text_key(before: Json | None, content: str, calls: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Two replies of the same words to different questions may have different blanks, so the question counts as well."""
    spelled = [(name, canonical_json(arguments)) for name, arguments in calls]
    if any(arguments is None for _, arguments in spelled):
        return
    asked = _text(before.get("content")) if before is not None else ""
    key = json.dumps([asked, content.strip(), spelled]).encode()
    yield f"text {hashlib.blake2b(key, digest_size=16).hexdigest()}"


# from a reply to what is remembered of it


def remembered_reply(reply: Json, written: str, closing_tag: str | None, render: Render) -> RememberedReply | None:
    """What is worth remembering of a reply: ``reply`` is the message that the client got, ``written`` all that the model
    wrote. None: however the client writes it, the template will render the same."""
    if len(written) > MAX_REPLY_CHARS:
        return None
    thought: str = reply.get("reasoning_content") or ""
    head, tag, rest = written.partition(closing_tag) if thought and closing_tag else ("", "", "")
    answer = rest.lstrip() if tag else written
    calls = tuple(
        RememberedCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in reply.get("tool_calls") or ()
    )
    plain = RememberedReply(reply["content"] or "" if calls else answer, calls, thought)
    if calls and _shows_text_better(plain, answer, written, render):
        plain = msgspec.structs.replace(plain, as_text=answer)
    spaced = _with_blanks(head, thought) if tag else thought
    if spaced != thought and _shows_blanks_better(plain, spaced, written, render):
        plain = msgspec.structs.replace(plain, spaced_reasoning=spaced)
    is_plain = not calls and answer == answer.strip() and plain.spaced_reasoning is None
    return None if is_plain else plain


def _with_blanks(head: str, thought: str) -> str:
    """The thinking with the white space around it; ``head`` may begin with a tag."""
    before, found, after = head.partition(thought)
    return f"{before[len(before.rstrip()) :]}{thought}{after}" if found else thought


def _shows_text_better(reply: RememberedReply, answer: str, written: str, render: Render) -> bool:
    """Whether the calls come closer to what the model wrote as text than as calls. False where the template does not
    render that text in the place of its calls."""
    results = list(results_of(reply.message(with_reasoning=False), "Yes."))
    bare = {"role": "assistant", "reasoning_content": reply.reasoning} if reply.reasoning else {"role": "assistant"}
    framed = render([_QUESTION, {**bare, "content": _SIGN}, *results])
    as_calls = render([_QUESTION, reply.message(with_reasoning=True), *results])
    as_text = render([_QUESTION, {**bare, "content": answer}, *results])
    if framed is None or as_text is None or framed.count(_SIGN) != 1:
        return False
    wanted = framed.replace(_SIGN, answer)
    if as_text != wanted and as_text != framed.replace(_SIGN, answer.strip()):
        return False  # the template does more with content than to show it
    if as_calls is None:
        return True
    known = (render([_QUESTION]) or "") + written  # to the engine, if the template shows thinking again
    calls_score, text_score = ((common_prefix(known, t), common_prefix(wanted, t)) for t in (as_calls, as_text))
    return text_score > calls_score


def _shows_blanks_better(reply: RememberedReply, spaced: str, written: str, render: Render) -> bool:
    asked = render([_QUESTION])
    results = list(results_of({"tool_calls": [_call(call) for call in reply.calls]}, "Yes.")) or [_QUESTION]
    with_spaces = msgspec.structs.replace(reply, spaced_reasoning=spaced)
    bare, wide = (render([_QUESTION, each.message(with_reasoning=True), *results]) for each in (reply, with_spaces))
    if asked is None or bare is None or wide is None:
        return False
    return common_prefix(asked + written, wide) > common_prefix(asked + written, bare)
