"""Who wrote it: a keyed BLAKE3 over an object's name, its model's fingerprint, its size and its head. Pure.

The head holds the BLAKE3 of every section and all other bytes must be zero, so the seal covers every byte without a second
pass over them. Without the key nobody can make one, move one to another name, or pass off another model's as this one's.
"""

from __future__ import annotations

import hmac
import struct

import blake3

SEAL_BYTES = 32

_LENGTH = struct.Struct("<Q")


class Seal:
    def __init__(self, key: bytes, fingerprint: str) -> None:
        """``key`` is used as it is; what is made of it for one purpose says nothing about another."""
        self._key = _derived(key, "everwarm remote objects 1: seal")
        self._fingerprint = fingerprint.encode()
        self.key_id = _derived(key, "everwarm remote objects 1: name of the key").hex()[:16]

    def of(self, name: str, size: int, head: bytes | memoryview) -> bytes:
        """For an object of ``size`` bytes, of which ``head`` says what all others are."""
        hasher = blake3.blake3(key=self._key)
        for part in (name.encode(), self._fingerprint):
            hasher.update(_LENGTH.pack(len(part)) + part)
        hasher.update(_LENGTH.pack(size))
        hasher.update(head)
        return bytes(hasher.digest())

    def is_right(self, seal: bytes, name: str, size: int, head: bytes | memoryview) -> bool:
        return hmac.compare_digest(seal, self.of(name, size, head))


def _derived(key: bytes, purpose: str) -> bytes:
    return bytes(blake3.blake3(key, derive_key_context=purpose).digest())
