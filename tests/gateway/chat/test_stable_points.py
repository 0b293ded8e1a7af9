"""The stable point, against what really comes next: templates in the style of eight model families, talks by chance.

Of a prompt and one way to go on, the truth is the common prefix of the two texts. A hint may be short of it by no more than
what asks for the reply, because behind the end of the last message every point is as good as that end.
"""

import datetime
import os
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everwarm.errors import BadRequest
from everwarm.gateway.chat import stable_points
from everwarm.gateway.chat.chat_template import ChatTemplate, Rendered
from everwarm.gateway.chat.jinja_template import Given, Template
from support.conversations import (
    SOURCES,
    TEMPLATES,
    TOOLS,
    Talk,
    calling,
    nexts,
    replies,
    results,
    spoken,
    talks,
    texts,
)

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
KWARGS: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": False},
    {"preserve_thinking": True},
    {"keep_past_thinking": True},
)
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
HELLO = {"role": "user", "content": "Hello!"}

by_template = pytest.mark.parametrize("name", SOURCES)
by_chance = settings(max_examples=2000 if CAMPAIGN else 25, deadline=None)
seldom = settings(max_examples=200 if CAMPAIGN else 5, deadline=None)


def common(texts: list[str]) -> int:
    return min(stable_points.common_prefix(texts[0], text) for text in texts)


def now_and_next(template: ChatTemplate, talk: Talk, after: list[Any], kwargs: Any) -> tuple[Rendered, list[str]]:
    now = template.conversation(talk.messages, tools=talk.tools, **kwargs)
    return now, [template.render(messages, tools=talk.tools, **kwargs) for messages in after]


def test_there_is_a_template_of_every_family():
    assert len(SOURCES) == 8


@by_template
@by_chance
@given(st.data(), st.sampled_from(KWARGS))
def test_every_likely_next_turn_begins_with_all_up_to_a_stable_point_that_is_as_deep_as_can_be(name, data, kwargs):
    talk = data.draw(talks())
    template = TEMPLATES[name]
    now, after = now_and_next(template, talk, data.draw(nexts(talk)), kwargs)
    assert now.hints.stable is not None and now.hints.stable == now.hints.stables[0]
    assert all(text.startswith(now.text[: now.hints.stable]) for text in after)
    end = len(template.render(talk.messages, tools=talk.tools, add_generation_prompt=False, **kwargs))
    assert now.hints.boundaries[-1] == end
    assert set(now.hints.stables) == {min(stable_points.common_prefix(now.text, text), end) for text in after}


def test_a_prompt_itself_is_not_what_the_next_turn_begins_with():
    """The test above can fail: a generation prompt that opens a thought is no part of the next prompt."""
    after = [HELLO, {"role": "assistant", "content": "Hi."}, HELLO]
    for name in ("qwen35", "nemotron_h"):
        now = TEMPLATES[name].conversation([HELLO])
        assert now.hints.stable < len(now.text) and not TEMPLATES[name].render(after).startswith(now.text)


@by_template
@by_chance
@given(st.data())
def test_what_changes_with_every_message_is_behind_the_stable_point(name, data):
    talk = data.draw(talks())
    count = "{{ 'abcdefghijklmnopqrstuvwxyz'[messages | length % 26] }}"
    counting = ChatTemplate("{{ bos_token }}<<" + count + ">>" + SOURCES[name], bos="<s>")
    now, after = now_and_next(counting, talk, data.draw(nexts(talk)), {})
    assert now.hints.stable is not None and now.hints.stable < now.text.index(">>")
    assert all(text.startswith(now.text[: now.hints.stable]) for text in after)


@by_template
@by_chance
@given(talks(), st.data(), st.sampled_from(KWARGS))
def test_thinking_and_calls_come_again_as_the_text_after_a_reply_says(name, talk, data, kwargs):
    template = TEMPLATES[name]
    reply = data.draw(calling() if talk.tools and data.draw(st.booleans()) else replies())
    begins = template.after_reply(talk.messages, reply, tools=talk.tools, **kwargs)
    silent = {k: v for k, v in reply.items() if k != "reasoning_content"}
    after = []
    for sent in (reply, silent):
        for word in ("apart", "Zeal"):
            words = word + data.draw(texts)
            what = results(reply, [words, words]) if "tool_calls" in reply else [{"role": "user", "content": words}]
            messages = [*talk.messages, sent, *what]
            after.append(template.render(messages, tools=talk.tools, **kwargs))
    assert begins is not None and all(text.startswith(begins) for text in after)
    assert len(begins) == common(after)


def test_the_text_after_a_reply_holds_the_reply_without_its_thinking():
    reply = {"role": "assistant", "content": "Forty-two.", "reasoning_content": "Hm."}
    begins = TEMPLATES["qwen35"].after_reply([HELLO], reply)
    assert begins is not None and begins.endswith("assistant\nForty-two.<|im_end|>\n<|im_start|>user\n")
    kept = TEMPLATES["qwen35"].after_reply([HELLO], reply, preserve_thinking=True)
    assert kept is not None and kept.endswith("assistant\n<think>\n")  # sent back or not: nobody knows


# the quote of a long conversation


@st.composite
def long_talks(draw: st.DrawFn) -> Talk:
    """Many turns, most of them of kinds that were there before."""
    some = [draw(talks(max_turns=2)) for _ in range(draw(st.integers(1, 3)))]
    plain = [[m for m in talk.messages if m["role"] != "system"] for talk in some]
    messages: list[Any] = [m for m in some[0].messages[:1] if m["role"] == "system"]
    order = draw(st.lists(st.integers(0, len(plain) - 1), min_size=24, max_size=40))
    for i in order[:-1]:
        messages += [*plain[i], draw(st.sampled_from([*plain[i], {"role": "assistant", "content": "Done."}]))]
        if messages[-1]["role"] != "assistant":
            messages[-1] = {"role": "assistant", "content": "Well."}
    return Talk([*messages, *plain[order[-1]]], some[0].tools)


@by_template
@seldom
@given(long_talks())
def test_a_quote_says_what_the_whole_conversation_says(name, talk):
    template = TEMPLATES[name]
    try:
        quoted = template.conversation(talk.messages, tools=talk.tools)
    except BadRequest:
        assume(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stable_points, "_MIN_LEFT_OUT", 1 << 30)
        assert template.conversation(talk.messages, tools=talk.tools) == quoted


FORGETFUL = (
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content and loop.index0 > ns.asked %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("n_before", [0, 1, 15])
def test_one_thought_in_a_long_chain_of_calls_is_in_the_quote(n_before):
    step = [{"role": "assistant", "content": "a", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}]
    thought = [{**step[0], "reasoning_content": "Hm."}, step[1]]
    chain = [HELLO, *step * n_before, *thought, *step * 15, *thought, *step * 4]
    template = Template(FORGETFUL)
    quote = stable_points.Quote.of(template.lay_out(chain, Given()), chain)
    assert quote is not None and len(quote.messages) < len(chain) - 16
    now = ChatTemplate(FORGETFUL).conversation(chain, tools=TOOLS)
    assert now.text[now.hints.stable :].startswith("(Hm.)a<tool>4") and "(Hm.)" not in now.text[: now.hints.stable]
    assert now.hints.stables == (now.hints.stable, len(now.text))


# what else a next turn may be


@pytest.mark.parametrize("name", ["chatml", "qwen35", "granite4"])
@by_chance
@given(spoken, spoken, spoken)
def test_a_reply_that_was_begun_by_the_client_is_finished_in_place(name, question, begun, more):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": begun}]
    now = TEMPLATES[name].conversation(messages, add_generation_prompt=False)
    whole = [messages[0], {"role": "assistant", "content": begun + "." + more}, {"role": "user", "content": "So?"}]
    assert now.hints.stable is not None and now.hints.stable >= now.text.index(question.strip())
    assert TEMPLATES[name].render(whole).startswith(now.text[: now.hints.stable])


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_refuses_tools_still_has_a_stable_point():
    now = ChatTemplate(STRICT).conversation([HELLO], tools=TOOLS)
    assert now.text[: now.hints.stable] == "<user>Hello!" and now.hints.stables == (now.hints.stable,)


def test_a_template_that_refuses_every_next_turn_has_none():
    once = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}"
    assert ChatTemplate(once).conversation([HELLO]).hints.stable is None
    assert ChatTemplate(once).after_reply([HELLO], {"role": "assistant", "content": "a"}) is None


# time and chance


def dated(form: str) -> Rendered:
    source = "<date>{{ strftime_now('" + form + "') }}</date>" + SOURCES["chatml"]
    return ChatTemplate(source).conversation([HELLO])


def test_a_date_is_shared_with_the_next_turn_and_a_time_of_day_is_not():
    assert dated("%d %B %Y").hints.stable == dated("%d %B %Y").hints.boundaries[-1]
    assert 0 < (dated("%H:%M:%S").hints.stable or 0) < len("<date>00:00:00")


@given(st.datetimes())
def test_the_next_turn_comes_on_the_same_day_at_another_time(now):
    later = Given(now=now.replace(year=2028)).later.now
    assert later.date() == now.replace(year=2028).date()
    assert abs(later - now.replace(year=2028)) > datetime.timedelta(hours=1)


def test_nothing_in_a_template_is_left_to_chance():
    source = "{{ range(1000) | random }}" + SOURCES["chatml"]
    assert len({ChatTemplate(source).conversation([HELLO]) for _ in range(5)}) == 1
    with pytest.raises(BadRequest):
        ChatTemplate("{{ lipsum() }}").render([HELLO])


def test_a_template_that_changes_lists_gets_lists_of_its_own():
    source = (
        "{% set seen = [] %}{% for m in messages %}{% set _ = seen.append(m.role) %}{{ seen | join(',') }};{% endfor %}"
    )
    template = ChatTemplate(source)
    first = template.conversation([HELLO, {"role": "assistant", "content": "a"}, HELLO])
    assert (
        first.text
        == "user;user,assistant;user,assistant,user;"
        == template.render([HELLO, {"role": "assistant", "content": "a"}, HELLO])
    )
    assert first.hints.stable == len(first.text) and first.hints.boundaries == (5, 20, 40)
