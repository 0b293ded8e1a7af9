"""What a model wrote is rendered again as it was written, however a client writes it; what a client changed is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everwarm.errors import BadRequest
from everwarm.gateway.chat.chat_template import ChatTemplate
from everwarm.gateway.chat.prepare import prepare_chat
from everwarm.gateway.chat.reply_memory import (
    RememberedReply,
    canonical_json,
    keys_of,
    keys_of_reply,
    remembered_reply,
    restored,
)
from everwarm.gateway.openai.schema import ChatBody
from everwarm.gateway.parsing.output_parser import ModelSyntax, OutputParser
from everwarm.gateway.parsing.tool_parser import kinds_of

TEMPLATES = Path(__file__).parents[2] / "support" / "templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Writes a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "number"}}},
    },
}
ASKED = {"role": "user", "content": "Write it."}
RESULT = "done"

XML_CALL = (
    "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n"
    "<parameter=n>\n1.50\n</parameter>\n</function>\n</tool_call>"
)
# what models of each template write, in their own spelling
WRITTEN = {
    "falcon_h1": 'I write.\n<tool_call>\n{"name":"write","arguments":{"path": "a\\u00e9",  "n": 1.50}}\n</tool_call>',
    "granite4": '<tool_call>{"arguments": {"path" :"a", "n": 1e2}, "name": "write"}</tool_call>',
    "jamba": '<tool_calls>[\n{"name": "write", "arguments": {"n":2}},\n{"name": "write", "arguments": {}}]</tool_calls>',
    "lfm2": "<|tool_call_start|>[write(path='a', n=1), write(path=\"it's\")]<|tool_call_end|>",
    "nemotron_h": 'Hm.</think>Yes.\n\n<TOOLCALL>[ {"name": "write", "arguments": {"path": "a"}} ]</TOOLCALL>',
    "qwen35": f"Hm.\n</think>\n\n{XML_CALL}",
    "qwen3coder": "Now.\n<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
    "chatml": '\n<tool_call>{"name": "write", "arguments": {"path": "a",   "n": 0}}</tool_call>',
}

SHOWN_OTHERWISE = ("nemotron_h",)  # thinking is opened in the prompt and dropped from the history


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text())


class Client:
    """One turn with a template: what the model wrote, what the client got, and the next prompt."""

    def __init__(self, template: ChatTemplate, written: str, **options: Any) -> None:
        self.template, self.written, self.options = template, written, options
        self.prompt = self.rendered([ASKED])
        syntax = ModelSyntax(template.source)
        self.style = syntax.thinking(self.prompt)
        self.reply = OutputParser.of(syntax, self.prompt, kinds_of([TOOL]), with_thinking=True).message(written)
        found = remembered_reply(self.reply, written, self.style.closing if self.style else None, self._render)
        self.remembered = found

    def body(self, messages: list[Any]) -> ChatBody:
        return ChatBody(messages=messages, tools=[TOOL], chat_template_kwargs=self.options or None)

    def rendered(self, messages: list[Any], remembered: Any = None) -> str:
        found = prepare_chat(
            self.body(messages), self.template, lambda _: "", adds_bos=False, remembered=remembered or {}
        )
        return found.text

    def after(self, reply: dict[str, Any], *, remembers: bool = True) -> str:
        """The next prompt, if the client sends the reply like this."""
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in reply.get("tool_calls") or ()
        ]
        messages = [ASKED, reply, *(results or [{"role": "user", "content": "And?"}])]
        known = self.known(messages) if remembers else {}
        return self.rendered(messages, known)

    def known(self, messages: list[Any]) -> dict[int, list[RememberedReply]]:
        """By the keys alone, as a store finds it."""
        if self.remembered is None:
            return {}
        own = set(keys_of_reply(self.remembered, ASKED))
        return {i: [self.remembered] for i, keys in keys_of(messages).items() if own & set(keys)}

    def _render(self, messages: list[Any]) -> str | None:
        try:
            return self.template.render(messages, tools=[TOOL], **self.options)
        except BadRequest:
            return None


def respelled(reply: dict[str, Any], **dumps: Any) -> dict[str, Any]:
    """The same reply from a client that parses arguments and writes them again."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), **dumps),
            },
        }
        for call in reply["tool_calls"]
    ]
    return {**reply, "content": (reply["content"] or "").strip(), "tool_calls": calls}


COMPACT = {"separators": (",", ":"), "ensure_ascii": False}


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_call_is_rendered_as_it_was_written_in_every_format(name):
    client = Client(template_of(name), WRITTEN[name])
    assert client.reply["tool_calls"], "the model called a tool"
    sent = respelled(client.reply, **COMPACT)
    text = client.after(sent)
    if name in SHOWN_OTHERWISE:
        assert WRITTEN[name].rpartition("</think>")[2].strip() in text
    else:
        assert text.startswith(client.prompt + WRITTEN[name])
    assert client.after(client.reply) == text, "both spellings are one prompt"
    assert WRITTEN[name] not in client.after(sent, remembers=False), "the control"
    without_ids = {**sent, "tool_calls": [{**call, "id": f"call0000{i}"} for i, call in enumerate(sent["tool_calls"])]}
    assert client.after(without_ids) == text, "a client without ids of ours"


def test_templates_that_render_objects_need_nothing_where_the_model_writes_as_they_do():
    """The control: the same prompt with and without what is remembered."""
    template = template_of("qwen35")
    shown = called({"path": "a", "n": 1.5}, reasoning_content="Hm.")
    text = template.render([ASKED, shown], tools=[TOOL], add_generation_prompt=False).removesuffix("<|im_end|>\n")
    client = Client(template, text.removeprefix(Client(template, "").prompt))
    assert client.remembered is not None and client.remembered.as_text is None
    sent = respelled(client.reply, **COMPACT)
    assert client.after(sent) == client.after(sent, remembers=False) and client.after(sent).startswith(text)


def called(arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    function = {"name": "write", "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    } | more


CHANGES = {
    "value": lambda call: call | {"arguments": '{"path": "b", "n": 1}'},
    "order": lambda call: call | {"arguments": '{"n": 1, "path": "a"}'},
    "number": lambda call: call | {"arguments": '{"path": "a", "n": 1.0}'},
    "key": lambda call: call | {"arguments": '{"path": "a"}'},
    "name": lambda call: call | {"name": "erase"},
    "no JSON": lambda call: call | {"arguments": '{"path": "a", "n": 1'},
    "no object": lambda call: call | {"arguments": None},
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_what_a_client_changed_stands(change):
    client = Client(
        template_of("granite4"), '<tool_call>\n{"name": "write", "arguments": {"path":  "a", "n": 1}}\n</tool_call>'
    )
    call = client.reply["tool_calls"][0]
    sent = {**client.reply, "tool_calls": [{**call, "function": CHANGES[change](call["function"])}]}
    messages = [ASKED, sent, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]
    assert restored(messages, {1: [client.remembered]}) == messages
    same = {
        **client.reply,
        "tool_calls": [{**call, "function": call["function"] | {"arguments": '{"path":"a","n":1}'}}],
    }
    control = restored([ASKED, same, messages[2]], {1: [client.remembered]})
    assert control == [ASKED, client.remembered.message(with_reasoning=False), messages[2]] and control[1] != same


def test_of_a_changed_message_the_clients_words_stand():
    written = 'I write.\n\n<tool_call>\n{"name": "write", "arguments": {"path":  "a"}}\n</tool_call>'
    client = Client(template_of("granite4"), written)
    sent = {**respelled(client.reply, **COMPACT), "content": "I read."}
    text = client.after(sent)
    assert "I read." in text and '{"path": "a"}' in text and "I write" not in text
    assert '{"path":  "a"}' in client.after(respelled(client.reply, **COMPACT)), (
        "a control: unchanged, it is the model's"
    )


def test_of_a_changed_message_the_calls_are_still_known_where_the_template_shows_their_text():
    calls = '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}\n</tool_call>'
    shown = '<{{ m.role }}>{{ m.content or "" }}{% for c in m.tool_calls or [] %}' + calls + "{% endfor %}"
    written = 'I write.\n\n<tool_call>\n{"name": "write", "arguments": {"path":  "a"}}\n</tool_call>'
    client = Client(ChatTemplate("{% for m in messages %}" + shown + "{% endfor %}"), written)
    sent = {**respelled(client.reply, **COMPACT), "content": "I read."}
    text = client.after(sent)
    assert "I read." in text and '{"path":  "a"}' in text and "I write" not in text
    other = {**sent, "tool_calls": [{**sent["tool_calls"][0], "id": "call_of_another"}]}
    assert '{"path":"a"}' in client.after(other), "a control: a call with another id is the client's"


def test_thinking_that_was_left_out_stays_left_out():
    written = f"I must.\n</think>\n\n{XML_CALL}"
    client = Client(template_of("qwen35"), written)
    assert client.reply["reasoning_content"] == "I must."
    assert "I must." in client.after(client.reply)
    assert "I must." not in client.after({k: v for k, v in client.reply.items() if k != "reasoning_content"})
    assert "I may." in client.after({**client.reply, "reasoning_content": "I may."})


def test_white_space_around_thinking_is_rendered_where_the_template_adds_none():
    written = "<think>\nI must.\n</think>\n<|tool_call_start|>[write(path='a')]<|tool_call_end|>"
    client = Client(template_of("lfm2"), written)
    assert client.remembered.spaced_reasoning == "\nI must.\n"
    assert "<think>\nI must.\n</think>" in client.after(client.reply)
    assert "<think>I must.</think>" in client.after(client.reply, remembers=False)


def test_blanks_around_a_text_come_back():
    client = Client(template_of("chatml"), "  It is so.\n\n")
    stripped = {"role": "assistant", "content": "It is so."}
    assert client.after(stripped).startswith(client.prompt + "  It is so.\n\n<|im_end|>")
    assert client.after({"role": "assistant", "content": [{"type": "text", "text": "It is so."}]}) == client.after(
        stripped
    )
    assert Client(template_of("chatml"), "It is so.").remembered is None, "nothing to remember"
    elsewhere = [{"role": "user", "content": "Another question."}, stripped, ASKED]
    assert client.known(elsewhere) == {}, "the same words to another question may have other blanks"


def test_breakpoints_and_unknown_fields_survive():
    client = Client(template_of("chatml"), " It is so.")
    part = {"type": "text", "text": "It is so.", "cache_control": {"type": "ephemeral"}}
    messages = [ASKED, {"role": "assistant", "content": [part], "name": "x"}, ASKED]
    (_, message, _) = restored(messages, client.known(messages))
    assert message == {
        "role": "assistant",
        "content": " It is so.",
        "name": "x",
        "cache_control": {"type": "ephemeral"},
    }


def test_the_last_message_is_never_changed():
    client = Client(template_of("chatml"), "  It is so.")
    messages = [ASKED, {"role": "assistant", "content": "It is so."}]
    assert client.known(messages) == {} and restored(messages, {1: [client.remembered]}) == messages


def test_a_template_that_refuses_what_is_remembered_gets_what_the_client_sent():
    refuses = "{% if m.content.startswith(' ') %}{{ raise_exception('no') }}{% endif %}"
    source = f"{{% for m in messages %}}{refuses}{{{{ m.content }}}}{{% endfor %}}"
    client = Client(ChatTemplate(source), " It is so.")
    assert client.after({"role": "assistant", "content": "It is so."}) == "Write it.It is so.And?"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ('{"a": 1}', '{"a":1}', True),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"a": 1.10}', '{"a": 1.1}', True),
        ('{"a": 1}', '{"a": 1.0}', False),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', False),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": "1"}', '{"a": 1}', False),
    ],
)
def test_equal_json(one, other, is_same):
    assert (canonical_json(one) == canonical_json(other)) is is_same


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', "{", "", "[" * 100_000, f'{{"a": {"9" * 5000}}}'])
def test_what_is_no_plain_json_is_equal_to_nothing(text):
    assert canonical_json(text) is None


@pytest.mark.parametrize(
    "message", [{}, {"tool_calls": 3}, {"tool_calls": [3, {}, {"id": 4}, {"function": 5}]}, {"content": 7}]
)
def test_any_message_has_keys(message):
    assert list(keys_of([{"role": "assistant", **message}, ASKED])) == [0]
    reply = RememberedReply("x")
    messages = [{"role": "assistant", **message}, ASKED]
    assert restored(messages, {0: [reply]}) == messages
