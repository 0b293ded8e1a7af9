"""What of a cluster needs no Ray: its file, what replicas publish, how many there should be, everybody's numbers in one."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response

from everwarm.demo import EMBEDDED_MODEL
from everwarm.errors import BadRequest
from everwarm.gateway.http.sse import json_response
from everwarm.ray.fan_out import labelled, merged
from everwarm.ray.replica_messages import METRIC, ROUTERS, ByWaitingTokens, PrefixSet, ProxiedRequest, unpacked, wanted
from everwarm.ray.settings import read_cluster

WHOLE = """
default = "small"
[server]
port = 0
ingresses = 2
[remote]
url = "memory:///"
[engine]
slots = 4
disk-cache = 0
[models.small]
path = "demo:"
alias = ["s"]
[models.small.replicas]
least = 1
most = 8
gpus = 0.5
[models.large]
path = "models/large.gguf"
slots = 2
[models.large.replicas]
count = 3
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_a_file_says_everything(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, WHOLE))
    small, large = cluster.models
    assert (small.path, large.path) == (EMBEDDED_MODEL, tmp_path / "models/large.gguf")
    assert (small.settings.n_slots, large.settings.n_slots) == (4, 2)
    assert small.settings.remote is not None and small.settings.store is None
    replicas = cluster.replicas
    assert (replicas["small"].most, replicas["large"].count, cluster.n_ingresses) == (8, 3, 2)
    found = [cluster.find(name) for name in ("large", "s", "small:latest", None, "unheard-of")]
    assert found == [large, small, small, small, small]


def test_without_a_file_the_embedded_model_is_served() -> None:
    (model,) = read_cluster(None).models
    assert model.path == EMBEDDED_MODEL and read_cluster(None).find("anything") == model


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "there are no models"),
        ("[models.a]\n", "[models.a] has no path"),
        ("[models.a]\npath = 'x'\nslotz = 3", "did you mean 'slots'"),
        ("[models.a]\npath = 'x'\n[models.a.replicas]\ncount = 0", "count is 0; give a whole number of at least 1"),
        ("[models.a]\npath = 'x'\n[models.a.replicas]\ncount = 1\nmost = 2", "give count, or least and most"),
        ("[models.a]\npath = 'x'\nreplicas = 3", "replicas: 3 is no table; give one"),
        ("[models.a]\npath = 'x'\n[models.a.replicas]\nleast = 3\nmost = 2", "least is 3 and most is 2"),
        ("[models.a]\npath = 'x'\nalias = 'b'\n[models.b]\npath = 'x'", "'b' is the name of two models"),
        ("default = 'c'\n[models.a]\npath = 'x'", "default is 'c'"),
        ("[server]\nhost = '0.0.0.0'\n[models.a]\npath = 'x'", "can be reached from other machines"),
        ("[remote]\nurl = 's3://b/p'\n[models.a]\npath = 'x'", "needs a key file"),
        ("[models.a]\nhf = 'o/r'", "has hf"),
        ("[[[", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(BadRequest) as error:
        read_cluster(written(tmp_path, text))
    assert complaint in str(error.value)


def test_held_keys_are_bounded_and_the_last_used_stay() -> None:
    held = PrefixSet(4)
    held.use([1, 2, 3])
    held.use([1, 2, 4, 5])
    assert unpacked(held.packed()) == (1, 2, 4, 5)
    held.use([1])
    held.use([1 << 63])
    assert unpacked(held.packed()) == (4, 5, 1, 1 << 63) and len(held) == 4
    assert unpacked(b"1234567") == ()


def test_only_what_was_not_read_before_is_new() -> None:
    held = PrefixSet(10)
    held.use([1, 2])
    assert held.n_new([1, 2, 3], [10, 20, 35]) == 15
    assert held.n_new([7, 8], [10, 20]) == 20 and held.n_new([], []) == 0


@pytest.mark.parametrize(("tokens", "requests", "n"), [(0, 0, 0), (1, 0, 1), (10_001, 3, 2), (0, 9, 3), (50_000, 9, 5)])
def test_replicas_are_wanted_for_what_waits_and_for_slots(tokens: int, requests: int, n: int) -> None:
    assert wanted(tokens, requests, 10_000, 4) == n
    reported = {METRIC: {"a": tokens / 2, "b": tokens / 2}}
    context = SimpleNamespace(aggregated_metrics=reported, total_num_requests=requests)
    assert ByWaitingTokens(10_000, 4)(context) == (n, {})


def test_everybodys_metrics_are_one_text() -> None:
    text = '# HELP a_total Some\n# TYPE a_total counter\na_total 3.0\n# TYPE b gauge\nb{kind="x y"} 1.0\n'
    joined = labelled({("m", "r1"): text, ("m", "r2"): text})
    assert joined.count("# TYPE a_total counter") == 1
    assert 'a_total{model_id="m",replica="r1"} 3.0\na_total{model_id="m",replica="r2"} 3.0\n' in joined
    assert 'b{model_id="m",replica="r2",kind="x y"} 1.0' in joined


class Answers:
    """Replicas of two models, each with one way to answer."""

    def __init__(self, bodies: dict[str, Response]) -> None:
        self.bodies = bodies
        self.asked: list[tuple[str, str]] = []

    async def ask(self, request: ProxiedRequest, model: str) -> Response:
        self.asked.append((model, request.replica))
        return self.bodies[model]

    def merged(self, path: str) -> Any:
        """The status and the body of the answer."""
        found = asyncio.run(merged(ProxiedRequest("r", "GET", path), list(self.bodies), self.ask))
        return None if found is None else (found.status_code, bytes(found.body))


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, names in (("a", ["r1", "r2"]), ("b", ["r3"])):
        monkeypatch.setitem(ROUTERS, model, SimpleNamespace(names=names))


def test_the_lists_of_all_models_are_one_list() -> None:
    lists = [json_response({"data": [{"id": id}], "last_id": id}) for id in "ab"]
    status, body = Answers(dict(zip("ab", lists, strict=True))).merged("/v1/models")
    assert (status, json.loads(body)) == (200, {"data": [{"id": "a"}, {"id": "b"}], "last_id": "b"})


def test_a_model_that_cannot_list_answers_for_all() -> None:
    refused = json_response({"error": "no"}, 503)
    assert Answers({"a": json_response({"data": []}), "b": refused}).merged("/models") == (503, b'{"error":"no"}')


@pytest.mark.parametrize(("b", "missing"), [(200, []), (503, ["b"])])
def test_a_cluster_is_ready_when_every_model_is(routers: None, b: int, missing: list[str]) -> None:
    status, body = Answers({"a": Response(), "b": Response(status_code=b)}).merged("/ready")
    assert status == (503 if missing else 200) and json.loads(body)["missing"] == missing


def test_a_model_without_replicas_is_missing() -> None:
    status, body = Answers({"c": Response()}).merged("/ready")
    assert status == 503 and json.loads(body) == {"status": "starting", "models": 1, "missing": ["c"]}


def test_every_replica_is_asked_for_its_metrics(routers: None) -> None:
    answers = Answers({"a": Response("# TYPE n gauge\nn 1\n"), "b": Response("# TYPE n gauge\nn 2\n")})
    status, body = answers.merged("/metrics")
    assert answers.asked == [("a", "r1"), ("a", "r2"), ("b", "r3")]
    assert status == 200 and b'n{model_id="b",replica="r3"} 2' in body


def test_other_requests_are_for_one_replica() -> None:
    assert Answers({"a": Response()}).merged("/v1/chat/completions") is None
