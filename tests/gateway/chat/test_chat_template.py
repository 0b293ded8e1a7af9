"""Chat templates: untrusted, rendered as their authors meant, and cut where the next turn will agree."""

import contextlib
import copy
import datetime
from pathlib import Path
from typing import Any

import pytest

from everwarm.errors import BadRequest
from everwarm.gateway.chat.chat_template import ChatTemplate, in_known_roles
from everwarm.gateway.chat.jinja_template import Template

STYLES = Path(__file__).parents[2] / "support" / "templates"
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello!"}
HI = {"role": "assistant", "content": "Hi!"}
BYE = {"role": "user", "content": "Bye."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


@pytest.fixture(scope="module")
def embedded(embedded_model) -> ChatTemplate:
    """The template of the embedded model."""
    assert embedded_model.chat_template is not None
    return ChatTemplate(embedded_model.chat_template, eos="<|im_end|>")


def render(source: str, messages: list[dict[str, Any]] | None = None, **more: Any) -> str:
    return ChatTemplate(source).render(messages or [HELLO], **more)


# the sandbox


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ''|attr('__class__')|string }}{{ ''.__class__.x }}",
        "{{ (messages|map(attribute='__class__')|list)[0].x }}",
        "{{ lipsum.__globals__['os'].system('true') }}",
    ],
)
def test_a_template_cannot_reach_the_inside_of_python(source):
    try:
        text = render(source)
    except BadRequest:
        return
    assert "class" not in text and "object" not in text and "0x" not in text


@pytest.mark.parametrize("source", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}"])
def test_a_template_cannot_load_files(source):
    with pytest.raises((BadRequest, TypeError)):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ messages[0].content.nothing.more }}", id="undefined"),
        pytest.param("{{ messages[0] + 1 }}", id="wrong type"),
        pytest.param("{{ 1 / 0 }}", id="division"),
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", id="recursion"),
        pytest.param("{{ range(1000000) | list | length }}", id="long range"),
        pytest.param("{{ 'x' * 2 ** 100 }}", id="long text"),
    ],
)
def test_whatever_a_template_does_wrong_is_a_bad_request(source):
    with pytest.raises(BadRequest):
        render(source)


def test_the_messages_are_never_changed():
    messages, tools = [copy.deepcopy(HELLO)], [copy.deepcopy(TOOL)]
    before = copy.deepcopy((messages, tools))
    source = "{% set _ = messages.append(messages[0]) %}{% set _ = messages[0].update({'content': 'x'}) %}x"
    source += "{% set _ = tools[0].function.pop('name') %}"
    template = ChatTemplate(source)
    for ask in (template.render, template.conversation):
        with contextlib.suppress(BadRequest):
            ask(messages, tools=tools)
        assert (messages, tools) == before


# what templates expect of their renderer


def test_what_a_template_raises_is_the_callers_mistake_in_its_own_words():
    with pytest.raises(BadRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_cannot_be_parsed_is_refused():
    with pytest.raises(BadRequest, match="cannot be parsed"):
        ChatTemplate("{% if %}")


def test_json_is_not_escaped_for_html():
    value = {"q": "a<b & 'c' \u00e9 🦉", "n": [1, None, True]}
    assert render("{{ v | tojson }}", v=value) == '{"q": "a<b & \'c\' é 🦉", "n": [1, null, true]}'
    assert render("{{ v | tojson(indent=1) }}", v=[1]) == "[\n 1\n]"
    assert render("{{ 'é' | tojson(ensure_ascii=true) }}") == '"\\u00e9"'


def test_the_date_can_be_asked_for():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + i) for i in (-1, 0)}


def test_loops_can_be_left_and_continued():
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
    assert render(source + "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "023"


def test_generation_marks_stand_for_nothing():
    assert render("a{% generation %}b{{ messages|length }}{% endgeneration %}c") == "ab1c"


def test_blocks_leave_no_blank_lines():
    assert render("{% if true %}\nx\n    {% endif %}\ny") == "x\ny"


def test_special_tokens_and_more_variables_are_there():
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}{{ mood }}{{ tools }}", bos="<s>", eos="</s>")
    assert template.render([HELLO], mood="good") == "<s></s>good"


def test_thinking_is_on_unless_it_is_switched_off():
    source = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}|{% if enable_thinking %}<t>"
    )
    source += "{% else %}<t></t>{% endif %}{% endif %}"
    template = ChatTemplate(source)
    assert template.render([HELLO]) == "Hello!|<t>" and template.render([HELLO], enable_thinking=False).endswith("</t>")


def test_a_system_message_that_the_template_refuses_comes_before_the_next_one():
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}[{{ m.content }}]"
    template = ChatTemplate(source + "{% endfor %}")
    now = template.conversation([SYSTEM, HELLO, HI, BYE])
    assert now.text == "[Be brief.\nHello!][Hi!][Bye.]"
    assert template.render([SYSTEM, HELLO, HI, BYE, HI, HELLO]).startswith(now.text[: now.hints.stable])


@pytest.mark.parametrize("path", sorted(STYLES.glob("*.jinja")), ids=lambda path: path.stem)
def test_a_begun_reply_is_continued_and_the_next_turn_shares_it(path):
    template = ChatTemplate(path.read_text(), bos="<s>", eos="</s>")
    begun = {"role": "assistant", "content": "It is"}
    now = template.conversation([HELLO, begun], continues="content")
    assert now.text.endswith("It is")
    after = template.after_reply([HELLO, begun], {"role": "assistant", "content": " so."}, continues="content")
    full = template.render([HELLO, {**begun, "content": "It is so."}, BYE])
    assert after is not None and full.startswith(after) and "It is so." in after
    assert now.hints.stable is not None and full.startswith(now.text[: now.hints.stable])


# where to cut


def test_boundaries_are_the_ends_of_messages(embedded):
    messages = [SYSTEM, HELLO, HI, BYE]
    rendered = embedded.conversation(messages)
    parts = [
        rendered.text[a:b] for a, b in zip((0, *rendered.hints.boundaries), rendered.hints.boundaries, strict=False)
    ]
    assert parts[0] == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert parts[1] == "<|im_start|>user\nHello!<|im_end|>\n"
    assert rendered.text[rendered.hints.boundaries[-1] :] == "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("has_answered_before", [False, True])
def test_boundaries_are_the_ends_of_messages_whose_thinking_is_dropped(embedded_model, has_answered_before):
    """In a loop of tools the thinking is shown; a question later it is not, and everything has moved."""
    template = ChatTemplate(embedded_model.chat_template, eos="<|im_end|>")
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    loop = [
        HELLO,
        {"role": "assistant", "content": "", "reasoning_content": "Long thoughts. " * 9, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {**HI, "reasoning_content": "More of them. " * 9},
    ]
    if has_answered_before:
        kept = template.conversation(loop[:3], tools=[TOOL])
        assert "Long thoughts" in kept.text and len(kept.hints.boundaries) == 4
    rendered = template.conversation([*loop, BYE], tools=[TOOL])
    parts = [
        rendered.text[a:b] for a, b in zip((0, *rendered.hints.boundaries), rendered.hints.boundaries, strict=False)
    ]
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    assert "Long thoughts" not in rendered.text
    assert [part.removeprefix("<|im_start|>").split("\n")[0] for part in parts] == roles
    assert all(part.endswith("<|im_end|>\n") and part.count("<|im_end|>") == 1 for part in parts)


def test_the_stable_point_is_before_what_the_next_turn_drops(embedded):
    rendered = embedded.conversation([SYSTEM, HELLO])
    assert rendered.hints.stable is not None
    assert rendered.text[rendered.hints.stable :] == "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("n_turns", [1, 2, 5])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_the_next_turn_begins_with_everything_up_to_the_stable_point(embedded, thinking, n_turns, tools):
    messages = [SYSTEM, HELLO]
    for i in range(n_turns):
        now = embedded.conversation(messages, tools=tools, enable_thinking=thinking)
        messages = [*messages, {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{i}"}, BYE]
        following = embedded.conversation(messages, tools=tools, enable_thinking=thinking)
        assert following.text.startswith(now.text[: now.hints.stable])
        assert now.hints.stable == max(now.hints.boundaries)


def test_hints_are_within_the_text_and_in_order(embedded):
    for messages in ([HELLO], [SYSTEM], [HI], [HELLO, HELLO], [{"role": "tool", "content": "4"}], [{}]):
        rendered = embedded.conversation(messages)
        assert list(rendered.hints.boundaries) == sorted(set(rendered.hints.boundaries))
        assert all(0 < at <= len(rendered.text) for at in rendered.hints.boundaries)
        assert rendered.hints.stable is None or 0 < rendered.hints.stable <= len(rendered.text)


def test_hints_do_not_depend_on_what_was_rendered_before(embedded, embedded_model):
    talks = [[SYSTEM, HELLO], [HELLO, HI, BYE], [SYSTEM, HELLO, HI, BYE], [HELLO]]
    for messages in (*talks, *reversed(talks)):
        fresh = ChatTemplate(embedded_model.chat_template, eos="<|im_end|>").conversation(messages)
        assert embedded.conversation(messages) == fresh
    assert (
        embedded.conversation([HELLO], tools=[TOOL]).hints.boundaries != embedded.conversation([HELLO]).hints.boundaries
    )


def test_a_template_that_wants_alternation_still_gets_its_conversation():
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.content }}]{% endfor %}{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    )
    rendered = ChatTemplate(source).conversation([HELLO, HI, BYE])
    assert rendered.text == "[Hello!][Hi!][Bye.]" and rendered.hints.boundaries == (8, 13, 19)


def test_a_long_conversation_is_rendered_about_once(embedded_model, monkeypatch):
    lengths, lay_out = [], Template.lay_out

    def counted(self: Template, messages: Any, *given: Any, **more: Any) -> Any:
        lengths.append(len(messages))
        return lay_out(self, messages, *given, **more)

    monkeypatch.setattr(Template, "lay_out", counted)
    messages = [HELLO, HI] * 100 + [BYE]
    ChatTemplate(embedded_model.chat_template).conversation(messages, tools=[TOOL])
    assert max(lengths) == len(messages) and sum(lengths) < 1.5 * len(messages)


PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
ONE_TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
ONLY_PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("source", [ONE_TEXT, BOTH, ONLY_PARTS])
@pytest.mark.parametrize("content", ["one two", PARTS])
def test_content_comes_as_the_template_takes_it(source, content):
    """A list of parts in a template that wants one text would be printed as Python writes it."""
    expected = "<user>one \ntwo" if (source, content) == (ONE_TEXT, PARTS) else "<user>one two"
    assert ChatTemplate(source).render([{"role": "user", "content": content}]) == expected


def test_images_and_refusals_in_a_list_do_not_get_lost_as_text():
    content = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}, "b"]
    assert ChatTemplate(ONE_TEXT).render([{"role": "user", "content": content}]) == "<user>a\nno\nb"


@pytest.mark.parametrize("role", ["wizard", "", 3, ["user"], "x" * 100])
def test_a_role_that_the_template_would_leave_out_is_refused(role):
    source = "{% for m in messages %}{% if m.role == 'observer' %}!{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
    template = ChatTemplate(source)
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
    with pytest.raises(BadRequest, match=r"messages\[1\].role is .*; give system, user, assistant or tool"):
        in_known_roles(messages, template)
    known = [{"role": "observer", "content": "b"}]
    assert in_known_roles(known, template) == known  # this template has a role of its own
