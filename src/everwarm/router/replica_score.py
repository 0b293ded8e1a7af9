"""Chooses a replica for a request: the seconds that its cache saves, against the seconds of waiting there. Pure.

A replica that has cached the prefix of a prompt saves prefilling it; a busy one costs waiting. Both are seconds, so a
popular prefix does not pile up on one replica: when its queue costs more than the prefill, another one prefills it, and
then two have it. Where no replica has a prefix, the emptier of two random ones is chosen. The caller passes the random
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica as a router sees it. ``busy_s``: reading that was sent there and cannot be over yet."""

    busy_s: float = 0.0
    n_running: int = 0
    n_slots: int = 1
    seconds_per_byte: float = 1e-4
    reply_s: float = 1.0

    @property
    def wait_s(self) -> float:
        """Prefills run one after the other; beyond the slots, a running request must finish first."""
        n_ahead = max(0, self.n_running + 1 - self.n_slots)
        return self.busy_s + n_ahead * self.reply_s / self.n_slots

    def first_token_s(self, n_new_bytes: int) -> float:
        """Seconds until the first token of a request. ``n_new_bytes``: how many of its bytes were not read here before."""
        return self.wait_s + n_new_bytes * self.seconds_per_byte


def choose(reusable: Sequence[int], n_bytes: int, loads: Sequence[ReplicaLoad], dice: tuple[float, float]) -> int:
    """The index of a replica. ``reusable[i]`` bytes of ``n_bytes`` were read by replica ``i`` before. ``dice``: two numbers
    in [0, 1)."""
    assert loads and len(reusable) == len(loads)
    n = len(loads)
    first = int(dice[0] * n)
    if not any(reusable):
        second = (first + 1 + int(dice[1] * (n - 1))) % n
        return min((first, second), key=lambda i: loads[i].wait_s)
    return min(((first + i) % n for i in range(n)), key=lambda i: loads[i].first_token_s(n_bytes - reusable[i]))


class ReadingQueue:
    """How long a replica still reads: what was sent there from here, and what it publishes.

    A publication is up to ``period_s`` old when it arrives, so as much of it may be over. What was sent from here is known
    at once, and so is its end.
    """

    def __init__(self) -> None:
        self._sent: dict[str, float] = {}  # a request, and when it should have been read
        self._published_until = 0.0

    def publish(self, now: float, read_s: float, period_s: float) -> None:
        self._published_until = now + read_s - period_s

    def send(self, now: float, request_id: str, read_s: float) -> None:
        self._sent = {id: until for id, until in self._sent.items() if until > now}
        self._sent[request_id] = max(now, *self._sent.values(), self._published_until) + read_s

    def end(self, request_id: str) -> None:
        self._sent.pop(request_id, None)

    def busy_s(self, now: float) -> float:
        return max(now, self._published_until, *self._sent.values()) - now


class Holdings:
    """Which replicas have read which prefixes. One mask of replicas per key, so that many replicas cost one look."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._held: dict[str, set[int]] = {}
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def names(self) -> set[str]:
        return set(self._bits)

    def add(self, name: str, keys: Iterable[int]) -> None:
        bit = self._bit(name)
        held = self._held[name]
        for key in keys:
            if key not in held:
                held.add(key)
                self._masks[key] = self._masks.get(key, 0) | bit

    def replace(self, name: str, keys: Iterable[int]) -> None:
        """Sets what a replica has now; keys that it had before and that are not given are forgotten."""
        self._bit(name)
        now = set(keys)
        self._take(name, self._held[name] - now)
        self.add(name, now)

    def drop(self, name: str) -> None:
        """Forgets a replica that is gone."""
        if name in self._bits:
            self._take(name, set(self._held[name]))
            del self._held[name], self._bits[name]

    def holders(self, key: int) -> list[str]:
        mask = self._masks.get(key, 0)
        return [name for name, bit in self._bits.items() if mask & bit]

    def reach(self, keys: Sequence[int], ends: Sequence[int], names: Sequence[str]) -> list[int]:
        """For each replica, how many bytes of a request it has read before: up to the end of the longest prefix it has."""
        places = {self._bits[name]: i for i, name in enumerate(names) if name in self._bits}
        left = sum(places)
        found = [0] * len(names)
        for key, end in zip(reversed(keys), reversed(ends), strict=True):
            hit = self._masks.get(key, 0) & left
            left &= ~hit
            while hit:
                lowest = hit & -hit
                found[places[lowest]] = end
                hit ^= lowest
            if not left:
                break
        return found

    def check(self) -> None:
        """Both views say the same."""
        assert all(self._masks.values()) and len(set(self._bits.values())) == len(self._bits)
        seen = {(name, key) for key in self._masks for name in self.holders(key)}
        assert seen == {(name, key) for name, held in self._held.items() for key in held}

    def _bit(self, name: str) -> int:
        if name not in self._bits:
            taken = sum(self._bits.values())
            self._bits[name] = ~taken & (taken + 1)  # the lowest that is free
            self._held[name] = set()
        return self._bits[name]

    def _take(self, name: str, keys: set[int]) -> None:
        bit = self._bits[name]
        held = self._held[name]
        for key in keys:
            mask = self._masks[key] & ~bit
            if mask:
                self._masks[key] = mask
            else:
                del self._masks[key]
        held -= keys
