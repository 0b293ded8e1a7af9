"""The remote tier by itself: what was written comes back, what nobody with the key wrote does not, and a store that fails
costs little."""

from __future__ import annotations

import asyncio
import itertools
import logging
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everwarm.config import read_key
from everwarm.engine.settings import RemoteSettings
from everwarm.errors import BadRequest
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import root_key
from everwarm.state.remote import remote_tier as remote_module
from everwarm.state.remote.bucket import Bucket, BucketPiece, StoreFault
from everwarm.state.remote.pointer import GRIDS, MAC_BYTES, Mac, Parcel, probes
from everwarm.state.remote.remote_tier import FIRST_OPEN_S, MOST_OPEN_S, PIECE, CircuitBreaker, RemoteTier
from everwarm.state.store.object import Damaged
from everwarm.state.tier import OnPrompts
from support.parcels import ITEMS, KEY, MODEL, N, fetch, find, parcel, read, stored

PATIENT_S = 10.0  # a busy machine is no dead store
_fresh = itertools.count()


@pytest.fixture(params=["memory", "file"])
def place(request, tmp_path) -> Path | str:
    return f"memory://unit-{next(_fresh)}" if request.param == "memory" else f"file://{tmp_path}/store"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened() -> Iterator:
    made: list[RemoteTier] = []

    def make(url: str, key: bytes = KEY, model: str = MODEL, bucket: Bucket | None = None) -> RemoteTier:
        made.append(RemoteTier(bucket or Bucket(url), key, model, wait_s=PATIENT_S))
        return made[-1]

    yield make
    for one in made:
        one.close()


def files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.rglob("*") if path.is_file()}


# there and back


@pytest.mark.parametrize("kv_bytes", [1, 100_000, PIECE, 2 * PIECE + 4096])
def test_what_was_offered_is_found_by_another_and_is_the_same(place, opened, kv_bytes):
    one, other, mine = opened(place), opened(place), parcel(kv_bytes=kv_bytes)
    assert one.offer(mine) and one.flush()
    post = find(other)
    assert post == mine.pointer and fetch(other, post) == stored(mine)
    assert other.counts.n_bytes_read > kv_bytes and other.counts.n_failures == other.counts.n_refused == 0


def test_a_guess_of_the_size_that_is_wrong_costs_only_another_request(place, opened):
    one, mine = opened(place), parcel()
    assert one.offer(mine) and one.flush()
    need = mine.pointer.needs[0]
    assert read(one, need.name, need.size - 5000, "kv") == stored(mine)[1]
    assert read(one, need.name, need.size + 5000, "kv") == stored(mine)[1]


def test_a_prompt_without_boundaries_finds_it_from_any_length(place, opened):
    one = opened(place)
    for n in (50, 120, N):
        one.offer(parcel(n))
    assert one.flush()
    for n in (N + 1, N + 30, len(ITEMS)):
        post = find(opened(place), ITEMS.first(n), ())
        assert post is not None and post.n_items == N


def test_only_what_the_prompt_begins_with_is_found(place, opened):
    one = opened(place)
    assert one.offer(parcel()) and one.flush()
    other = Prompt.of_tokens([*range(100, 299), 7, *range(300, 400)])
    assert find(one, other) is None and find(one, other, ()) is None
    assert find(opened(place), ITEMS.first(N)) is None, "nothing would be left to read"
    assert find(opened(place), space="another") is None
    assert find(opened(place)) is not None


def test_what_was_missed_is_not_asked_for_again_at_once(place, opened, monkeypatch):
    reader, writer = opened(place), opened(place)
    assert find(reader) is None
    writer.offer(parcel())
    assert writer.flush() and find(reader) is None
    monkeypatch.setattr(remote_module.time, "monotonic", lambda base=time.monotonic: base() + remote_module.MISS_S)
    assert find(reader) is not None


def test_what_one_writes_itself_is_not_missed(place, opened):
    one = opened(place)
    assert find(one) is None
    one.offer(parcel())
    assert one.flush() and find(one) is not None


def test_the_same_object_is_written_once(place, opened):
    one, other, mine = opened(place), opened(place), parcel()
    for remote in (one, one, other):
        assert remote.offer(mine) and remote.flush()
    assert one.counts.n_bytes_written > 2 * other.counts.n_bytes_written
    assert other.has(mine.pointer.name) and not other.has("state-of-another")


def test_what_was_forgotten_is_gone_for_everybody(place, opened):
    one = opened(place)
    one.offer(parcel(120))
    one.offer(parcel(N))
    one.forget(OnPrompts(root_key(MODEL, ""), (ITEMS,), beyond=150))
    assert one.flush()
    post = find(opened(place), ends=(120, N))
    assert post is not None and post.n_items == 120


def test_too_much_is_refused_and_not_waited_for(place, opened, monkeypatch):
    monkeypatch.setattr(remote_module, "MAX_QUEUED", 200_000)
    one = opened(place)
    assert one.offer(parcel()) and not all(one.offer(parcel(n)) for n in range(20, 60))
    assert one.flush() and one.counts.n_given_up > 0


def test_bytes_that_are_not_what_they_were_are_not_written(tmp_path):
    remote = RemoteTier(Bucket(f"file://{tmp_path}/store"), KEY, MODEL, is_sound=lambda _: False)
    remote.offer(parcel())
    assert remote.flush() and remote.counts.n_given_up == 1 and not files(tmp_path / "store")
    remote.close()


# who wrote it


def saved(folder: Path, opened) -> tuple[str, Parcel]:
    url, mine = f"file://{folder}", parcel()
    one = opened(url)
    assert one.offer(mine) and one.flush()
    return url, mine


@pytest.mark.parametrize("at", ["head", "middle", "end", "seal"])
def test_a_flipped_bit_is_seen_wherever_it_is(folder, opened, at):
    url, mine = saved(folder, opened)
    need = mine.pointer.needs[0]
    path = files(folder)[need.name]
    data = bytearray(path.read_bytes())
    data[{"head": 40, "middle": len(data) // 2, "end": -MAC_BYTES - 5, "seal": -1}[at]] ^= 1
    path.write_bytes(data)
    one = opened(url)
    with pytest.raises(Damaged):
        read(one, need.name, need.size, "kv")
    assert one.counts.n_refused == 1 and not one.breaker.is_open


@pytest.mark.parametrize("n", [0, 10, 5000, -1])
def test_a_truncated_object_is_a_miss(folder, opened, n):
    url, mine = saved(folder, opened)
    need = mine.pointer.needs[0]
    path = files(folder)[need.name]
    path.write_bytes(path.read_bytes()[:n])
    with pytest.raises(Damaged):
        read(opened(url), need.name, need.size, "kv")


def test_an_object_under_another_name_is_refused(folder, opened):
    url, mine = saved(folder, opened)
    other = parcel(N, prompt=Prompt.of_tokens(range(500, 800)))
    one = opened(url)
    assert one.offer(other) and one.flush()
    there = files(folder)
    for a, b in ((mine.pointer.name, other.pointer.name), (mine.names[0], other.names[0])):
        there[b].write_bytes(there[a].read_bytes())
    fresh = opened(url)
    with pytest.raises(Damaged, match="MAC"):
        read(fresh, other.pointer.name, other.pointer.size, "state")
    assert find(fresh, Prompt.of_tokens(range(500, 800))) is None and fresh.counts.n_refused == 2


def test_without_the_name_in_the_seal_the_replayed_one_would_pass(folder, opened, monkeypatch):
    """The negative control of the test above."""
    sealing = Mac.of
    monkeypatch.setattr(Mac, "of", lambda self, _name, size, head: sealing(self, "", size, head))
    url, mine = saved(folder, opened)
    other = parcel(N, prompt=Prompt.of_tokens(range(500, 800)))
    one = opened(url)
    assert one.offer(other) and one.flush()
    there = files(folder)
    there[other.names[0]].write_bytes(there[mine.names[0]].read_bytes())
    fresh = opened(url)
    assert find(fresh, Prompt.of_tokens(range(500, 800))) is None, "its lineage is another"
    assert fresh.counts.n_refused == 0, "its MAC was right all the same"


def test_another_models_object_is_refused(folder, opened):
    """Laid by hand where this model looks, under a name that fits."""
    url, mine = saved(folder, opened)
    foreign = opened(url, model="another|f16|f16|auto|unified")
    theirs = foreign._packed(mine.pointer.name, *mine.objects[1])
    files(folder)[mine.pointer.name].write_bytes(b"".join(bytes(piece) for piece in theirs))
    with pytest.raises(Damaged, match="MAC"):
        read(opened(url), mine.pointer.name, mine.pointer.size, "state")
    own = opened(url)._packed(mine.pointer.name, *mine.objects[1])
    files(folder)[mine.pointer.name].write_bytes(b"".join(bytes(piece) for piece in own))
    assert read(opened(url), mine.pointer.name, mine.pointer.size, "state") == stored(mine)[0]


def test_an_object_of_somebody_without_the_key_is_refused(folder, opened, monkeypatch):
    url, mine = saved(folder, opened)
    forged = RemoteTier(Bucket(url), bytes(32), MODEL)
    data = b"".join(bytes(piece) for piece in forged._packed(mine.pointer.name, *mine.objects[1]))
    forged.close()
    files(folder)[mine.pointer.name].write_bytes(data)
    with pytest.raises(Damaged, match="MAC"):
        read(opened(url), mine.pointer.name, mine.pointer.size, "state")
    monkeypatch.setattr(Mac, "is_right", lambda *_: True)
    assert read(opened(url), mine.pointer.name, mine.pointer.size, "state"), "this test could not fail"


def test_a_forged_signpost_is_refused(folder, opened, monkeypatch):
    url, mine = saved(folder, opened)
    lie = msgspec.structs.replace(mine.pointer, size=mine.pointer.size + 1)
    files(folder)[mine.names[0]].write_bytes(msgspec.json.encode(lie) + bytes(MAC_BYTES))
    one = opened(url)
    assert find(one) is None and one.counts.n_refused == 1
    monkeypatch.setattr(Mac, "is_right", lambda *_: True)
    assert find(opened(url)) == lie, "this test could not fail"


def test_two_keys_meet_nowhere(place, opened):
    one, other = opened(place), opened(place, key=bytes(32))
    assert one.offer(parcel()) and one.flush()
    assert find(other) is None and other.counts.n_refused == 0


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=300), st.integers(0, 2))
def test_any_bytes_at_all_are_refused(data, which):
    remote = RemoteTier(Bucket(f"memory://noise-{next(_fresh)}"), KEY, MODEL)
    try:
        name = (parcel().names[0], parcel().pointer.name, parcel().pointer.needs[0].name)[which]
        asyncio.run_coroutine_threadsafe(remote._send(name, [data or b"x"], over=True), remote._loop).result()
        assert find(remote) is None
        if which:
            with pytest.raises(Damaged):
                read(remote, name, len(data) or 1, "items")
    finally:
        remote.close()


# a store that fails


class Faulty(Bucket):
    """Does what ``fault`` says instead of its work, while there is one."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fault: Exception | float | None = None
        self.n_asked = 0

    async def _suffer(self, wait_s: float) -> None:
        self.n_asked += 1
        if isinstance(self.fault, Exception):
            raise self.fault
        if self.fault is not None:
            await asyncio.sleep(min(self.fault, wait_s))
            raise TimeoutError

    async def get(self, path: str, start: int, stop: int, wait_s: float, more_s: float = 0.0) -> BucketPiece:
        await self._suffer(wait_s)
        return await super().get(path, start, stop, wait_s, more_s)

    async def put(self, path, pieces, wait_s, *, over):
        await self._suffer(wait_s)
        return await super().put(path, pieces, wait_s, over=over)


def test_a_silent_store_is_asked_once_and_then_left_alone_until_it_answers(opened, monkeypatch):
    bucket = Faulty(url := f"memory://silent-{next(_fresh)}")
    writer, reader = opened(url), opened(url, bucket=bucket)
    reader.breaker, reader.wait_s = CircuitBreaker(_open_s=0.05), 0.1
    assert writer.offer(parcel()) and writer.flush()
    bucket.fault = 1000.0
    assert find(reader) is None and reader.breaker.is_open
    n_asked = bucket.n_asked
    assert find(reader) is None and find(reader, ends=(50,)) is None
    assert bucket.n_asked - n_asked <= 1, "only the trial in the background may ask"
    bucket.fault = None
    until(lambda: not reader.breaker.is_open)
    assert find(reader) == parcel().pointer


class Waits:
    """In place of the clock: whoever waits waits as long as he may, for nothing, and it takes no time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, futures, timeout: float):
        self.seconds.append(timeout)
        return set(), set(futures)


@pytest.mark.parametrize("wait_s", [0.25, 2.0])
def test_a_dead_store_costs_what_was_agreed_and_once(opened, monkeypatch, wait_s):
    """By our own account, not by the clock: connecting, asking for all pointers and their answers are one wait."""
    waits, bucket = Waits(), Faulty(url := f"memory://dead-{next(_fresh)}")
    remote = opened(url, bucket=bucket)
    remote.wait_s, bucket.fault = wait_s, 1000.0
    monkeypatch.setattr(remote_module, "wait", waits)
    for n in range(20):
        assert find(remote, ends=tuple(range(10 + n, N, 7))) is None
    assert waits.seconds == [wait_s] and remote.breaker.is_open
    remote.breaker.succeeded()
    assert find(remote, ends=(N,)) is None and waits.seconds == [wait_s] * 2, "a control: who asks again waits again"


def test_a_store_that_refuses_is_left_alone_after_some_refusals(opened):
    bucket = Faulty(url := f"memory://refusing-{next(_fresh)}")
    reader = opened(url, bucket=bucket)
    bucket.fault = StoreFault("503")
    for i in range(10):
        assert find(reader, ends=(40 + i,)) is None
    assert reader.breaker.is_open and bucket.n_asked < 10 and reader.counts.n_failures >= 3


def test_what_waits_is_written_when_the_store_is_back(opened, monkeypatch):
    bucket = Faulty(url := f"memory://back-{next(_fresh)}")
    one = opened(url, bucket=bucket)
    one.breaker = CircuitBreaker(is_open=True)
    assert one.offer(parcel()) and not one.flush(0.2) and bucket.n_asked == 0
    one.breaker.succeeded()
    assert one.flush() and find(opened(url)) is not None


def test_a_parcel_that_cannot_be_written_is_given_up_and_not_announced(opened, monkeypatch):
    bucket = Faulty(url := f"memory://never-{next(_fresh)}")
    one = opened(url, bucket=bucket)
    bucket.fault = StoreFault("500")
    assert one.offer(parcel()) and one.flush()
    assert one.counts.n_given_up == 1 and not one.has(parcel().pointer.name)
    assert find(opened(url)) is None


def test_the_breaker_opens_at_once_for_silence_and_waits_longer_each_time():
    breaker = CircuitBreaker()
    assert breaker.failed(slowly=False, luck=0.5) is None and not breaker.is_open
    assert breaker.failed(slowly=True, luck=0.5) == FIRST_OPEN_S and breaker.is_open
    assert breaker.failed(slowly=True, luck=0.5) is None, "it is open already"
    waits = [breaker.failed_again(0.5) for _ in range(10)]
    assert waits == sorted(waits) and waits[0] == 2 * FIRST_OPEN_S and waits[-1] == MOST_OPEN_S
    assert breaker.failed_again(0.0) < MOST_OPEN_S < breaker.failed_again(1.0)
    breaker.succeeded()
    assert not breaker.is_open and breaker.failed(slowly=True, luck=0.5) == FIRST_OPEN_S


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# where to look


@given(st.sets(st.integers(1, 5000), max_size=200), st.integers(0, 5000), st.integers(1, 5000))
def test_the_number_of_questions_is_bounded_and_the_deepest_is_among_them(ends, least, most):
    exact, cells = probes(ends, least, most)
    assert len(exact) + len(cells) <= 16 and all(least < at <= most for at in exact)
    inside = [end for end in ends if least < end <= most]
    assert not inside or {max(inside), min(inside)} <= set(exact)
    if not ends:
        wanted = [(grid, most // grid * grid) for grid in GRIDS]
        assert all(cell in cells for cell in wanted if cell[1] + cell[0] > least + 1)


# settings


def test_a_key_is_its_bytes_as_they_are(tmp_path, caplog):
    path = tmp_path / "key"
    path.write_bytes(b"\n" + bytes(31))
    path.chmod(0o600)
    assert read_key(str(path)) == b"\n" + bytes(31) and not caplog.records
    path.chmod(0o640)
    with caplog.at_level(logging.WARNING):
        read_key(str(path))
    assert "chmod 600" in caplog.text and stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("data", [None, b"", bytes(31), bytes((1 << 16) + 1)])
def test_a_bad_key_file_is_refused(tmp_path, data):
    path = tmp_path / "key"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(BadRequest, match="key file"):
        read_key(str(path))


@pytest.mark.parametrize(
    "url", ["", "bucket", "s3://", "s3:///x", "http://host/b", "file://host/x", "file://x", "gs://b"]
)
def test_a_bad_address_is_refused(url):
    with pytest.raises(BadRequest, match="remote store"):
        RemoteSettings(url, "key")


def test_a_shared_store_needs_a_key():
    with pytest.raises(BadRequest, match="key file"):
        RemoteSettings("s3://bucket/x")
    assert RemoteSettings("memory://x").key_file is None
