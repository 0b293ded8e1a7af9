"""What a request begins with, told from its body."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.gateway.chat.prefix_keys import MAX_BOUNDARIES, NOTHING, prefixes_of, response_key

SYSTEM = {"role": "system", "content": "Be kind."}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_conversation_that_goes_on_has_the_keys_it_had() -> None:
    before = prefixes_of({"messages": [SYSTEM, user("a")]})
    after = prefixes_of({"messages": [SYSTEM, user("a"), {"role": "assistant", "content": "b"}, user("c")]})
    assert after.keys[:2] == before.keys and after.ends[:2] == before.ends and len(after.keys) == 4
    assert list(after.ends) == sorted(after.ends) and after.n_bytes == after.ends[-1]


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [SYSTEM, user("b")]},
        {"messages": [SYSTEM, {"role": "assistant", "content": "a"}]},
        {"messages": [user("a"), SYSTEM]},
        {"messages": [SYSTEM, user("a")], "tools": TOOLS},
        {"messages": [SYSTEM, user("a")], "cache_salt": "mine"},
    ],
)
def test_what_differs_has_other_keys(other: dict[str, Any]) -> None:
    one = prefixes_of({"messages": [SYSTEM, user("a")]})
    assert prefixes_of(other).keys[-1] != one.keys[-1]
    assert prefixes_of({"messages": [SYSTEM, user("a")], "stream": True, "max_tokens": 3}) == one, "a control"


def test_what_comes_after_the_difference_differs_too() -> None:
    a, b = (prefixes_of({"messages": [user(text), user("same")]}) for text in ("x", "y"))
    assert not set(a.keys) & set(b.keys)


def test_marks_and_noise_do_not_count() -> None:
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    noisy = {"role": "system", "content": "x-anthropic-billing-header: cc_version=1; cch=abc12;\nBe kind."}
    plain = prefixes_of({"messages": [SYSTEM, user("a")]})
    assert prefixes_of({"messages": [noisy, {"role": "user", "content": [marked]}]}) == plain


def test_every_dialect_has_its_beginning() -> None:
    for body in (
        {"system": "s", "messages": [user("a")]},
        {"instructions": "s", "input": [user("a")]},
        {"instructions": "s", "input": "a"},
        {"prompt": "word " * 1000},
        {"prompt": list(range(1000))},
    ):
        assert len(prefixes_of(body).keys) >= 2, body
    longer = prefixes_of({"prompt": "word " * 1000 + "more"})
    assert longer.keys[:4] == prefixes_of({"prompt": "word " * 1000}).keys[:4]


def test_a_kept_response_binds() -> None:
    asked = prefixes_of({"input": "a", "previous_response_id": "resp_1"})
    assert asked.bound == response_key("resp_1") != response_key("resp_2")
    assert prefixes_of({"input": "a"}).bound is None


def test_long_conversations_have_a_bounded_number_of_keys() -> None:
    messages = [user(str(i)) for i in range(2000)]
    long, longer = prefixes_of({"messages": messages}), prefixes_of({"messages": [*messages, user("more")]})
    assert len(long.keys) == MAX_BOUNDARIES
    assert long.keys[-1] in longer.keys and long.keys[0] == longer.keys[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["messages", "tools", "system", "input", "prompt", "cache_salt"]), JSON) | JSON)
def test_no_body_is_refused(body: Any) -> None:
    found = prefixes_of(body)
    assert len(found.keys) == len(found.ends) and all(0 <= key < 1 << 64 for key in found.keys)
    assert isinstance(body, dict) or found == NOTHING
