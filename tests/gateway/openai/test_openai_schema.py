"""OpenAI's bodies: what their fields may hold."""

import msgspec
import pytest

from everwarm.config import MAX_LOGIT_BIASES
from everwarm.errors import BadRequest
from everwarm.gateway.openai.schema import ChatBody, read


def body_with_biases(n: int, *, listed: bool) -> bytes:
    bias = [[token, 1.0] for token in range(n)] if listed else {str(token): 1.0 for token in range(n)}
    return msgspec.json.encode({"messages": [{"role": "user", "content": "a"}], "logit_bias": bias})


@pytest.mark.parametrize("listed", [False, True])
def test_as_many_biases_as_can_be_sampled_with_pass_and_one_more_is_refused_by_name(listed):
    body = read(body_with_biases(MAX_LOGIT_BIASES, listed=listed), ChatBody)
    assert len(body.sampling().logit_bias) == MAX_LOGIT_BIASES
    with pytest.raises(BadRequest, match=rf"length <= {MAX_LOGIT_BIASES} - at `\$\.logit_bias`"):
        read(body_with_biases(MAX_LOGIT_BIASES + 1, listed=listed), ChatBody)
