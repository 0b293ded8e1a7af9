"""What some families of templates need beyond plain messages: fields under other names, results in other places.

A family is recognized by texts in the source of its templates. The prompts come out as llama-server renders them. Pure:
changes no argument; knows no Jinja.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everwarm.gateway.chat.content import Message, text_of_reply

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
