"""The log's own rules: what is repeated is counted, what is a request is one line."""

from __future__ import annotations

import json
import logging
import sys

from everwarm.gateway.admin.request_log import Caller, RequestRecord, fields, line
from everwarm.logs import ALIKE_S, FIELDS, MOST_ALIKE, JsonLine, RateLimit

CALLER = Caller("req_1", "tiny", "/v1/chat/completions", stream=False)


def record(message: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("everwarm.x", level, __file__, 1, message, args, None)


def test_a_warning_that_is_repeated_is_told_a_few_times_and_counted():
    now = [0.0]
    limit = RateLimit(lambda: now[0])
    told = [limit.filter(record("request %d waits", n)) for n in range(10_000)]
    assert sum(told) == MOST_ALIKE and all(told[:MOST_ALIKE])
    assert limit.filter(record("something else")) and limit.filter(record("request %d waits", 1, level=logging.INFO))
    now[0] = ALIKE_S
    again = record("request %d waits", 5)
    assert limit.filter(again)
    assert again.getMessage() == f"request 5 waits ({10_000 - MOST_ALIKE} more like it were left out)"
    calm = record("request %d waits", 6)
    assert limit.filter(calm) and calm.getMessage() == "request 6 waits"


def test_many_kinds_of_warnings_take_bounded_memory():
    limit = RateLimit(lambda: 0.0)
    assert all(limit.filter(record(f"kind {n}")) for n in range(5000))
    assert len(limit._seen) <= 256


def test_a_line_of_json_is_one_line_with_its_fields_and_its_exception():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made = record("it\nfailed: %s", "ü")
        made.exc_info = sys.exc_info()
    setattr(made, FIELDS, {"n": 3, "level": "never"})
    text = JsonLine().format(made)
    output = json.loads(text)
    assert "\n" not in text and output["message"] == "it\nfailed: ü" and output["n"] == 3
    assert output["level"] == "WARNING" and output["time"].endswith("Z") and "ValueError: two" in output["exception"]


def test_a_request_that_failed_shows_its_code_and_not_the_words_of_its_error():
    row = RequestRecord(
        "req_1", CALLER, status="failed", error="the prompt 'cormorant' is bad", error_code="invalid_request_error"
    )
    assert "failed (invalid_request_error)" in line(row) and "cormorant" not in line(row) + json.dumps(fields(row))


def test_a_request_that_left_before_it_began_is_a_line_as_well():
    row = RequestRecord("req_1", CALLER, status="cancelled")
    assert line(row) == "chat 0 tokens: 0 reused, 0 read; cancelled; tiny; req_1"
