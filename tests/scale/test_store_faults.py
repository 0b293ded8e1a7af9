"""A store that is late, cut off, full, half or out of date costs time and never gives a wrong state."""

from __future__ import annotations

import os
import random
import uuid

import pytest
from bench.seaweed import BUCKET, S3

from everwarm.prompt.prompt import Prompt
from everwarm.state.remote import remote_tier as remote_module
from everwarm.state.remote.bucket import Bucket
from everwarm.state.remote.pointer import Mac
from everwarm.state.remote.remote_tier import CircuitBreaker, RemoteTier
from everwarm.state.store.object import Damaged
from support.parcels import KEY, MODEL, N, fetch, find, parcel, stored
from support.proxy import FAULTS, Proxy, proxied

CAMPAIGN = bool(os.environ.get("EVERWARM_CAMPAIGN"))
N_OPERATIONS = 5000 if CAMPAIGN else 300
N_PROMPTS = 12


def prompts() -> list[Prompt]:
    """Pairs that begin alike, so that a mix-up would be possible."""
    return [
        Prompt.of_tokens([*range(7 * (i // 2), 7 * (i // 2) + 100), *range(1000 + i, 1200 + i)])
        for i in range(N_PROMPTS)
    ]


class Fleet:
    """Servers on one prefix that come and go; each sees the store through the proxy."""

    def __init__(self, proxy: Proxy, wait_s: float = 0.25) -> None:
        self._proxy = proxy
        self.wait_s = wait_s
        self._url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        self.n_refused = 0
        self.one = self._join()

    def _join(self) -> RemoteTier:
        remote = RemoteTier(Bucket(self._url, self._proxy.endpoint), KEY, MODEL, wait_s=self.wait_s)
        remote.breaker = CircuitBreaker(_open_s=0.02)
        return remote

    def renew(self) -> None:
        self.leave()
        self.one = self._join()

    def leave(self) -> None:
        self.one.flush(5)
        self.n_refused += self.one.counts.n_refused
        self.one.close()

    def check(self, prompt: Prompt) -> bool:
        """Whether it is there; and if it is, that it is the right one."""
        post = find(self.one, prompt)
        if post is None:
            return False
        try:
            found = fetch(self.one, post)
        except Damaged:
            return False
        assert found == stored(parcel(prompt=prompt)), "a wrong state was loaded"
        return True


def test_no_fault_gives_a_wrong_state(s3: S3, monkeypatch):
    monkeypatch.setattr(remote_module, "MISS_S", 0.0)
    rng, known, n_hits, n_tried = random.Random(1), prompts(), 0, 0
    with proxied(s3.endpoint, seed=2) as proxy:
        fleet = Fleet(proxy)
        proxy.faults, proxy.share = FAULTS, 0.15
        for _ in range(N_OPERATIONS):
            prompt, what = rng.choice(known), rng.random()
            if what < 0.3:
                fleet.one.offer(parcel(prompt=prompt))
            elif what < 0.35:
                fleet.renew()
            else:
                n_tried += 1
                n_hits += fleet.check(prompt)
        proxy.faults = ()
        fleet.wait_s = 10.0
        fleet.renew()
        for prompt in known:
            fleet.one.offer(parcel(prompt=prompt))
        assert fleet.one.flush(60)
        fleet.renew()
        assert all(fleet.check(prompt) for prompt in known), "the store is right again and something is not there"
        fleet.leave()
    assert set(proxy.met) == set(FAULTS) and n_hits > n_tried / 10, (proxy.met, n_hits, n_tried)
    assert fleet.n_refused > 0, "no flipped bit was ever seen"


def test_without_verifying_a_flipped_bit_would_be_loaded(s3: S3, monkeypatch):
    """The negative control of the test above."""
    (prompt, *_) = prompts()
    with proxied(s3.endpoint) as proxy:
        fleet = Fleet(proxy, wait_s=10.0)
        fleet.one.offer(parcel(prompt=prompt))
        assert fleet.one.flush(60)
        fleet.renew()
        post = find(fleet.one, prompt)
        assert post is not None
        proxy.faults, proxy.share = ("flipped",), 1.0
        with pytest.raises(Damaged):
            fetch(fleet.one, post)
        monkeypatch.setattr("everwarm.state.store.object.ObjectReader.read", _read_unverified)
        monkeypatch.setattr(Mac, "is_right", lambda *_: True)
        assert fetch(fleet.one, post) != stored(parcel(prompt=prompt))
        fleet.leave()


def _read_unverified(self, name, place=None, doubt=None):
    import numpy as np

    section = next(s for s in self.header.sections if s.name == name)
    return np.frombuffer(self._bytes(section.offset, section.length), np.uint8)


def test_moto_keeps_the_same_promises(monkeypatch):
    """Another S3: conditional writes, ranges, and what is not there."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=endpoint, **keys)
        client.create_bucket(Bucket="moto")
        client.close()
        for name, value in (("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "x"), ("AWS_REGION", "us-east-1")):
            monkeypatch.setenv(name, value)
        ones = [RemoteTier(Bucket("s3://moto/fleet", endpoint), KEY, MODEL, wait_s=10.0) for _ in range(3)]
        mine = parcel(kv_bytes=20_000_000)
        assert find(ones[0]) is None and ones[0].counts.n_failures == 0
        assert ones[1].offer(mine) and ones[1].flush(60) and ones[1].offer(mine)
        post = find(ones[2])
        assert post is not None and post.n_items == N and fetch(ones[2], post) == stored(mine)
        assert ones[2].offer(mine) and ones[2].flush(60) and ones[2].counts.n_bytes_written < 10_000
        nowhere = RemoteTier(Bucket("s3://no-such-bucket/fleet", endpoint), KEY, MODEL, wait_s=10.0)
        assert nowhere.offer(mine) and nowhere.flush(60) and nowhere.counts.n_given_up == nowhere.counts.n_failures == 1
        for one in (*ones, nowhere):
            one.close()
    finally:
        server.stop()
