"""Messages in the form that a template takes, and how it writes thinking, found out by rendering small ones.

Most templates take content as one text and would print a list of parts; many fail on content that is null, some on a
system message, and some encode the arguments of a call twice. Some families need more: fields under other names, results in
other places. A family is recognized by texts in the source of its templates. The prompts come out as llama-server renders
them. Pure but for the template, which is passed in; knows no Jinja.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everwarm.gateway.chat.content import Message, parts_as_text, text_as_parts, text_of_reply, with_objects

# families of templates

Reshape = Callable[[list[Message]], list[Message]]


def _unchanged(messages: list[Message]) -> list[Message]:
    return messages


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a template writes thinking: the texts before and after it, and ``nothing`` in the place of both where there was
    none. Without thinking all are empty."""

    opening: str = ""
    closing: str = ""
    nothing: str = ""

    def begun_reply(self, generation_prompt: str, reply: Message, *, with_content: bool) -> str:
        """The end of a prompt in which this reply is begun; without its content, its thinking goes on."""
        content = reply.get("content")
        thought = reply.get("reasoning_content") or ""
        head, found, _ = generation_prompt.partition(self.opening) if self.opening else (generation_prompt, "", "")
        if not found and self.opening:
            head = generation_prompt.partition(self.opening.strip())[0]
        if self.opening and not with_content:
            return head + self.opening + thought
        thinking = self.opening + thought + self.closing if self.opening else ""
        if self.nothing and not (thought and self.opening):
            head = head.removesuffix(self.nothing)
            thinking = self.nothing
        return head + thinking + text_of_reply(content)


@dataclass(frozen=True, slots=True)
class Family:
    """``thinking`` None: it has to be found by rendering. ``reopens``: a prompt that ends with the first
    text lacks the second. ``joins_parts``: content comes as one text although the template
    takes parts. ``keeps_developer``: the role is one of its own."""

    reshape: Reshape = _unchanged
    thinking: Thinking | None = None
    reopens: tuple[str, str] | None = None
    joins_parts: bool = False
    keeps_developer: bool = False

    def reopened(self, prompt: str) -> str:
        return prompt + self.reopens[1] if self.reopens and prompt.endswith(self.reopens[0]) else prompt


def family_of(source: str) -> Family:
    for is_member, family in _FAMILIES:
        if is_member(source):
            return family
    return Family()


# messages in the form that a family takes


def _with_thinking_blocks(messages: list[Message]) -> list[Message]:
    """Mistral 3: thinking is a content part of its own."""
    return [_as_blocks(message) if message["role"] in ("system", "assistant") else message for message in messages]


def _as_blocks(message: Message) -> Message:
    thinking = message.get("reasoning_content")
    content = message["content"]
    blocks = [{"type": "thinking", "thinking": thinking}] if isinstance(thinking, str) else []
    blocks += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**{k: v for k, v in message.items() if k != "reasoning_content"}, "content": blocks}


def _with_thinking_field(messages: list[Message]) -> list[Message]:
    return [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]


def _in_channels(messages: list[Message]) -> list[Message]:
    """Harmony: a call has thinking or text before it, never both."""
    named = _with_thinking_field(messages)
    return [
        {k: v for k, v in m.items() if k != "content"} if "thinking" in m and m.get("tool_calls") else m for m in named
    ]


def _always_with_thinking(messages: list[Message]) -> list[Message]:
    return [{"reasoning_content": "", **m} if m["role"] == "assistant" else m for m in messages]


def _trimmed(messages: list[Message]) -> list[Message]:
    return [
        {k: v.strip() if k in ("content", "reasoning_content") and isinstance(v, str) else v for k, v in m.items()}
        for m in messages
    ]


def _results_in_order_of_calls(messages: list[Message]) -> list[Message]:
    """DeepSeek V4 writes the results of one message's calls in the order of the calls."""
    found, order, at = list(messages), dict[str, int](), 0
    while at < len(found):
        if calls := found[at].get("tool_calls"):
            order = {call["id"]: i for i, call in enumerate(calls) if isinstance(call, dict) and call.get("id")}
        run = at
        while run < len(found) and found[run]["role"] in ("user", "tool"):
            run += 1
        places = [i for i in range(at, run) if found[i]["role"] == "tool"]
        results = sorted((found[i] for i in places), key=lambda m: order.get(m.get("tool_call_id", ""), 0))
        for place, result in zip(places, results, strict=True):
            found[place] = result
        at = max(run, at + 1)
    return found


def _results_in_calls(messages: list[Message]) -> list[Message]:
    """Older templates of Gemma 4: a call, its results and the answer after them are one message."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        calling = messages[at]
        at += 1
        if calling["role"] != "assistant" or not calling.get("tool_calls"):
            found.append(calling)
            continue
        n_results = next((i for i, m in enumerate(messages[at:]) if m["role"] != "tool"), len(messages) - at)
        merged = {k: v for k, v in calling.items() if k in ("role", "tool_calls", "reasoning_content")}
        if n_results:
            merged["tool_responses"] = _named_results(calling["tool_calls"], messages[at : at + n_results])
        at += n_results
        answer = messages[at] if at < len(messages) else None
        if answer and answer["role"] == "assistant" and not answer.get("tool_calls") and answer["content"]:
            merged["content"] = answer["content"]
            at += 1
        found.append(merged)
    return found


def _named_results(calls: Sequence[Message], results: Sequence[Message]) -> list[Message]:
    names = [call["function"].get("name") for call in calls if isinstance(call, dict) and "function" in call]
    names += [None] * len(results)
    return [
        {"name": name or result.get("tool_call_id", ""), "response": _parsed(result["content"])}
        for name, result in zip(names, results, strict=False)
    ]


def _parsed(content: object) -> object:
    try:
        return json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        return content


def _to_translate(messages: list[Message]) -> list[Message]:
    """TranslateGemma: a user's message names its languages."""
    return [{**m, "content": [_translated(m["content"])]} if m["role"] == "user" else m for m in messages]


def _translated(content: object) -> Message:
    parts: list[Message] = content if isinstance(content, list) else [{"text": content}]
    text = "\n".join(part.get("text", "") for part in parts if isinstance(part, dict))
    return {"type": "text", "text": text, "source_lang_code": "en-GB", "target_lang_code": "en-GB"}


# the families, in the order in which they are tried


def _has(*texts: str, without: Sequence[str] = ()) -> Callable[[str], bool]:
    return lambda source: all(text in source for text in texts) and not any(text in source for text in without)


_THINK = Thinking("<think>", "</think>")
_THINK_V4 = Thinking("<think>", "</think>", nothing="</think>")
_GEMMA_4 = Thinking("<|channel>thought\n", "<channel|>")
_GEMMA_4_TURN = ("<turn|>\n", "<|turn>model\n")
_FAMILIES: tuple[tuple[Callable[[str], bool], Family], ...] = (
    (
        _has("[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]", without=["[CALL_ID]"]),
        Family(_with_thinking_blocks, Thinking("[THINK]", "[/THINK]")),
    ),
    (
        _has("<|channel|>"),
        Family(
            _in_channels,
            Thinking("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
            keeps_developer=True,
        ),
    ),
    (
        _has("<atem:function_calls>", "<|eom|>"),
        Family(thinking=Thinking(" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>")),
    ),
    (_has(">>>all", ">>>${recipient}"), Family(thinking=Thinking(nothing="all\n"))),
    (_has("<|tool_calls_section_begin|>", "<|tool_call_begin|>"), Family(thinking=_THINK)),
    (
        _has("<|open|>", "<|close|>", "<|end_of_msg|>"),
        Family(thinking=Thinking("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>")),
    ),
    (
        _has("<|ifm|im_start|>", "<ifm|tool_calls>"),
        Family(_always_with_thinking, Thinking("<ifm|think>\n", "</ifm|think>")),
    ),
    (_has("<role>ASSISTANT</role>", "<arg_key>"), Family(thinking=_THINK)),
    (
        _has("<|START_TEXT|>", "<|START_ACTION|>"),
        Family(thinking=Thinking("<|START_THINKING|>", "<|END_THINKING|><|START_TEXT|>")),
    ),
    (_has("<|tool_list_start|>", "<|tool_list_end|>"), Family(_with_thinking_field)),
    (_has("List of tools: ["), Family(_with_thinking_field, _THINK, joins_parts=True)),
    (_has("]<]minimax[>[", "<tool_call>", "<invoke name="), Family(thinking=Thinking("<mm:think>", "</mm:think>"))),
    (_has("dsml_token", "DSML", "function_calls"), Family(thinking=_THINK)),
    (_has("dsml_token", "DSML", "tool_calls"), Family(_results_in_order_of_calls, _THINK_V4)),
    (
        _has("'<|tool_call>call:'", "{#- OpenAI Chat Completions:"),
        Family(thinking=_GEMMA_4, reopens=_GEMMA_4_TURN),
    ),
    (_has("'<|tool_call>call:'"), Family(_results_in_calls, _GEMMA_4, _GEMMA_4_TURN)),
    (
        _has("Tool usage guidelines:", '<function name="', '<param name="'),
        Family(thinking=Thinking("<think>\n", "\n</think>\n\n")),
    ),
    (_has("[source_lang_code]", "[target_lang_code]"), Family(_to_translate, Thinking())),
    (
        _has("You have access to the following functions in JSONSchema format"),
        Family(_trimmed, Thinking("<think>\n", "\n</think>\n\n")),
    ),
    (
        _has(
            "<tool_call>", "<function=", "<parameter=", "<think>", without=["'<tool_call><function=' ~ tool_call.name"]
        ),
        Family(thinking=Thinking("<think>\n", "\n</think>\n\n")),
    ),
    (_has("Write your thoughts between <think></think> and write your response between"), Family(thinking=_THINK)),
    (_has("<SPECIAL_10>", "<SPECIAL_11>", "<TOOL_RESPONSE>"), Family(thinking=Thinking("<think>\n", "</think>"))),
    (_has("laguna_glm_thinking"), Family(thinking=_THINK)),
)


# any template

Render = Callable[..., str]  # messages, and the template's other arguments; may raise anything
_PROBE = "a8f3c1"
_COMMON_TAGS = ("<think>", "[THINK]")  # of families in which some models do not think
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "f"}
_IN_PARTS = [{"type": "text", "text": _PROBE}]
_THOUGHT = "a8f3c1 hm well 1c3f8a"
_ANSWER = "b7e2d0 yes indeed 0d2e7b"
_MARK = r"(?:<[^>]*>|\[[^\]]*\])"
_AROUND = re.compile(rf"({_MARK}\s*){_THOUGHT}(\s*{_MARK}\s*)")
_AFTER = re.compile(rf"{_THOUGHT}\s*({_MARK}\s*)")
_N_TAIL = 64  # characters
_OLD_SPLIT = "content.split('</think>')"  # templates that strip thinking from the history and never write any


class MessageForms:
    def __init__(self, source: str, render: Render) -> None:
        self.family = family_of(source)
        self._source = source
        self._render = render

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        found = [self._as_wanted(message) for message in messages]
        if found and found[0].get("role") == "system" and not self._shows_system:
            found = _merged_into_next(found)
        return self.family.reshape(found)

    @functools.cached_property
    def thinking(self) -> Thinking:
        """How the template writes thinking; both texts are empty if it writes none."""
        known = self.family.thinking
        if known is None:
            return find_thinking(self._source, lambda messages, **more: self._render(self.adapted(messages), **more))
        names_it = known.opening.strip() in self._source or known.opening.strip() not in _COMMON_TAGS
        return known if names_it else Thinking()

    def _as_wanted(self, message: Message) -> Message:
        content = message.get("content")
        calls = message.get("tool_calls")
        if content is None or "role" not in message:
            message = {"role": "", **message, "content": "" if content is None else content}
        if isinstance(calls, list) and self._wants_objects:
            message = with_objects(message, calls)
        if isinstance(content, list) and not self._takes(message):
            return parts_as_text(message, content)
        if isinstance(message["content"], str) and self._wants_parts:
            return text_as_parts(message, message["content"])
        return message

    def _takes(self, message: Message) -> bool:
        """Whether the template takes parts as the content of such a message."""
        return self._takes_parts and (message["role"] != "tool" or self._takes_results_in_parts)

    @functools.cached_property
    def _takes_parts(self) -> bool:
        return not self.family.joins_parts and self._shows(_IN_PARTS) and self._takes_no_parts

    @property
    def _takes_no_parts(self) -> bool:
        try:
            self._render([{"role": "user", "content": []}])
        except Exception:  # noqa: BLE001 - any error means that it does not take this form
            return False
        return True

    @functools.cached_property
    def _wants_parts(self) -> bool:
        return self._takes_parts and not self._shows(_PROBE)

    @functools.cached_property
    def _takes_results_in_parts(self) -> bool:
        try:
            text = self._render([*self._calling({"a": 1}), {**_RESULT, "content": _IN_PARTS}])
        except Exception:  # noqa: BLE001 - any error means that it does not take this form
            return False
        return _is_clean(text)

    @functools.cached_property
    def _wants_objects(self) -> bool:
        """Whether a call's arguments should be an object, not JSON as text, as clients send them."""
        try:
            text = self._render(self._calling({_PROBE: "b"}))
        except Exception:  # noqa: BLE001 - any error means that it does not take this form
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text

    def _calling(self, arguments: Any) -> list[Message]:
        asked: Message = {"role": "user", "content": "a"}
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return self.family.reshape([asked, {"role": "assistant", "content": "", "tool_calls": [call]}])

    @functools.cached_property
    def _shows_system(self) -> bool:
        for as_form in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
            try:
                asked = {"role": "user", "content": as_form("a")}
                if _PROBE in self._render([{"role": "system", "content": as_form(_PROBE)}, asked]):
                    return True
            except Exception:  # noqa: BLE001 - any error means that it does not take this form
                continue
        return False

    def _shows(self, content: Any) -> bool:
        """Whether content of that form is rendered as its text alone."""
        try:
            text = self._render([{"role": "user", "content": content}])
        except Exception:  # noqa: BLE001 - any error means that it does not take this form
            return False
        return _is_clean(text)


def _is_clean(text: str) -> bool:
    """Whether the probe was written, and nothing of the form it came in."""
    return _PROBE in text and "'text'" not in text and '"text"' not in text


def _merged_into_next(messages: list[Message]) -> list[Message]:
    """A system message that the template does not take, put before the next message."""
    first, rest = messages[0], messages[1:]
    if not rest:
        return []
    before, after = first["content"], rest[0]["content"]
    if isinstance(before, str) and isinstance(after, str):
        return [{**rest[0], "content": f"{before}\n{after}"}, *rest[1:]]
    parts = [part for content in (before, after) for part in (_as_parts(content))]
    return [{**rest[0], "content": parts}, *rest[1:]]


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    """Tools with what a template may show of them; None: there are none."""
    return [_plain_tool(tool) for tool in tools] if tools else None


def _plain_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return tool
    about = {"description": "", "parameters": {}} | {k: v for k, v in function.items() if v is not None}
    return {
        "type": "function",
        "function": {"name": function["name"], "description": about["description"], "parameters": about["parameters"]},
    }


# thinking


def find_thinking(source: str, render: Render) -> Thinking:
    """By what stands around a thought, and by turning thinking off and on."""
    found = _beside_a_thought(render)
    if not (found.opening and found.closing):
        found = _by_switching(render, found)
    if not (found.opening or found.closing) and _OLD_SPLIT in source and "reasoning_content" not in source:
        return Thinking("<think>", "</think>")
    return found


def _beside_a_thought(render: Render) -> Thinking:
    asked: Message = {"role": "user", "content": "a"}
    reply: Message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    text = _tried(render, [asked, reply])
    if match := _AROUND.search(text):
        return Thinking(match[1], match[2])
    match = _AFTER.search(text)
    return Thinking("", match[1]) if match else Thinking()


def _by_switching(render: Render, known: Thinking) -> Thinking:
    """Some templates open thinking at the end of the prompt, or close it there where it is switched off."""
    asked: Message = {"role": "user", "content": "a"}
    off, on = (_tried(render, [asked], enable_thinking=thinks, add_generation_prompt=True) for thinks in (False, True))
    n = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(off, on, strict=False)))
    only_off, only_on = off[n:], on[n:]
    if not only_off.strip() and only_on.strip():
        return Thinking(known.opening or only_on, known.closing)
    marks = re.findall(_MARK, only_off)
    if not only_on.strip() and marks and not known.closing:
        before = marks[:1] if len(marks) > 1 else re.findall(_MARK, off[:n])[-1:]
        return Thinking("".join(before), marks[-1])
    for base, longer in ((on, off), (off, on)):  # other texts differ too, so only the ends are compared
        marks = _marks_after(base[-_N_TAIL:], longer)
        if len(marks) == 2:
            return Thinking(known.opening or marks[0], known.closing or marks[1])
    return known


def _marks_after(tail: str, text: str) -> list[str]:
    """The marks that follow the last place of the tail, if nothing else does."""
    at = text.rfind(tail) if tail else -1
    rest = text[at + len(tail) :].strip() if at >= 0 else ""
    marks = re.findall(_MARK, rest)
    return marks if "".join(marks) == "".join(rest.split()) else []


def _tried(render: Render, messages: Sequence[Message], **more: Any) -> str:
    try:
        return render(messages, **more)
    except Exception:  # noqa: BLE001 - a template that refuses this says nothing about thinking
        return ""
