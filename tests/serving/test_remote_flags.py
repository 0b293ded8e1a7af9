"""A store that servers share, from the command line: what is refused, and that it works without a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.server import key_file, metric, run_cli, serving, words

SYSTEM = {"role": "system", "content": words(200, 3)}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--remote", "s3://bucket/x"), "needs a key file"),
        (("--remote", "ftp://bucket/x", "--remote-key", "KEY"), "cannot be understood"),
        (("--remote", "s3://bucket", "--remote-key", "/does/not/exist"), "cannot be read"),
        (("--remote", "s3://bucket", "--remote-key", "SHORT"), "has 5 bytes"),
        (("--remote", "s3://bucket", "--remote-key", "KEY", "--remote-wait", "0"), "remote-wait is 0"),
        (("--remote-key", "KEY"), "need --remote"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(tmp_path, key, flags, says):
    (tmp_path / "short").write_bytes(b"short")
    named = {"KEY": str(key), "SHORT": str(tmp_path / "short")}
    done = run_cli("config", *(named.get(flag, flag) for flag in flags))
    assert done.returncode != 0 and says in " ".join((done.stdout + done.stderr).split())


def test_the_next_server_goes_on_from_the_store(tmp_path, key):
    flags = ("--remote", f"file://{tmp_path}/store", "--remote-key", str(key), "--remote-wait", "10")
    flags += ("--restore-policy", "always")
    messages = [SYSTEM, {"role": "user", "content": "How are you?"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    with serving(*flags) as server:
        first = server.ask("/v1/chat/completions", body)
    with serving(*flags) as server:
        again = server.ask("/v1/chat/completions", body)
        shown = server.get("/metrics").data.decode()
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    n_cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] - n_cached <= 16 and metric(shown, "everwarm_remote_hits_total") == 1
    assert metric(shown, "everwarm_remote_breaker_open") == 0 and metric(shown, "everwarm_remote_bytes_read_total") > 0
