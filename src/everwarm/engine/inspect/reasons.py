"""The codes of why a request read what it read, and their explanations: what the engine decides and the gateway shows."""

from __future__ import annotations

import enum

N_SHOWN = 16  # items on each side of a difference


class Reason(enum.Enum):
    HIT = "hit"
    EXTENDED = "extended"
    EDITED = "edited_at"
    NEW = "new"
    NO_CHECKPOINT = "no_checkpoint"
    EVICTED = "evicted"
    FINGERPRINT = "fingerprint"
    LOAD_SLOWER = "load_slower_than_compute"
    CACHE_OFF = "cache_off"
    DETERMINISTIC = "deterministic"
    REFUSED = "refused"
    CHECKPOINTS_OFF = "checkpoints_off"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Reason.HIT: "everything was known",
    Reason.EXTENDED: "it goes on where what is known ends",
    Reason.EDITED: "it differs from what is known",
    Reason.NEW: "nothing like it was ever read",
    Reason.NO_CHECKPOINT: "no checkpoint was kept inside the shared part",
    Reason.EVICTED: "its KV or its checkpoints were evicted",
    Reason.FINGERPRINT: "it is kept for another model, build or KV type only",
    Reason.LOAD_SLOWER: "reading it again is faster than loading it from disk",
    Reason.CACHE_OFF: "the request wanted no cache",
    Reason.DETERMINISTIC: "what is kept of it does not come from a reading that was alone",
    Reason.REFUSED: "what was kept of it could not be restored",
    Reason.CHECKPOINTS_OFF: "checkpoints are off (max_checkpoints is 0)",
}
