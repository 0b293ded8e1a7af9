"""llama-server's fields of speculation: a request limits its drafts, and a reply says how many were made."""

import msgspec
import pytest

from everwarm.engine.process import messages as m
from everwarm.errors import BadRequest
from everwarm.gateway.openai.encode import timings
from everwarm.gateway.openai.schema import ChatBody, CompletionBody, read

DONE = m.Done(
    id=1,
    text="",
    finish="stop",
    stop_text=None,
    n_prompt=10,
    n_cached=0,
    n_shared=0,
    n_reply=20,
    slot=0,
    checkpoint=None,
    queue_s=0.0,
    restore_s=0.0,
    prefill_s=0.1,
    decode_s=1.0,
)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_a_request_limits_its_drafts_by_llama_servers_name(kind):
    given = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    assert read(msgspec.json.encode(given), kind).max_draft is None
    assert read(msgspec.json.encode(given | {"speculative.n_max": 3}), kind).max_draft == 3


@pytest.mark.parametrize("n", [-1, 1 << 40, "many", 1.5])
def test_a_limit_that_is_no_count_is_refused_by_its_name(n):
    with pytest.raises(BadRequest, match=r"speculative\.n_max"):
        read(msgspec.json.encode({"prompt": "a", "speculative.n_max": n}), CompletionBody)


def test_a_reply_says_how_many_tokens_were_drafted_where_some_were():
    assert "draft_n" not in timings(DONE)
    drafted = timings(msgspec.structs.replace(DONE, n_drafted=8, n_draft_accepted=5))
    assert (drafted["draft_n"], drafted["draft_n_accepted"]) == (8, 5)
