"""What the names of GGUF files say: which are parts of one model, which quantisation it is, which projector belongs to it.

Pure: works on names alone, wherever they were listed.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})")
_QUANT = re.compile(
    r"(?:^|[-._])(?P<quant>(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP\d\w*|NVFP\d\w*|BF16|FP?16|FP?32))", re.IGNORECASE
)
_PROJECTOR = re.compile(r"[-._]?mmproj[-._]?", re.IGNORECASE)
_PROJECTOR_PREFERENCE = ("", "f16", "bf16", "q8_0", "f32")
_QUANT_PREFERENCE = ("q4_k_m", "q8_0")
_MANY = 3
LATEST = ":latest"  # what Ollama's clients add to a name without a tag


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one model. ``names`` are those that exist, in order; ``n_parts`` says how many there should be."""

    folder: str
    stem: str
    names: tuple[str, ...]
    n_parts: int = 1

    @property
    def label(self) -> str:
        """What tells it from other versions of the same model."""
        return quant_of(self.stem) or self.stem

    @property
    def missing(self) -> str | None:
        """Which parts are not there, in words."""
        if self.n_parts == 1:
            return None
        present = {int(name[-len("00001-of-00003.gguf") :][:5]) for name in self.names}
        absent = [part for part in range(1, self.n_parts + 1) if part not in present]
        if not absent:
            return None
        listed = ", ".join(f"{self.stem}-{part:05}-of-{self.n_parts:05}.gguf" for part in absent[:_MANY])
        more = f" and {len(absent) - _MANY} more" if len(absent) > _MANY else ""
        return f"{len(absent)} of {self.n_parts} parts {'is' if len(absent) == 1 else 'are'} missing: {listed}{more}"


def is_gguf(name: str) -> bool:
    """Hidden files and unfinished downloads (``.part``, ``.incomplete``) are not."""
    base = posixpath.basename(name)
    return base.lower().endswith(".gguf") and not base.startswith(".")


def is_projector(name: str) -> bool:
    return "mmproj" in posixpath.basename(name).lower()


def groups(names: Iterable[str]) -> list[Group]:
    """The models among these files, by name; projectors are left out."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(names):
        if not is_gguf(name) or is_projector(name):
            continue
        folder, stem = posixpath.split(name[: -len(".gguf")])
        part = _PART.fullmatch(stem)
        is_part = part is not None and 1 <= int(part["part"]) <= int(part["total"])
        key = (folder, part["stem"], part["total"]) if part is not None and is_part else (folder, stem, name)
        found.setdefault(key, []).append(name)
    return [
        Group(folder, stem, tuple(files), int(total) if total.isdecimal() else 1)
        for (folder, stem, total), files in found.items()
    ]


def quant_of(stem: str) -> str | None:
    """``Q4_K_M`` of ``Qwen3.5-4B-Q4_K_M``."""
    found = _quant_at_end(stem)
    return None if found is None else found["quant"].upper()


def without_quant(stem: str) -> str:
    found = _quant_at_end(stem)
    return stem if found is None else stem[: found.start()]


def _quant_at_end(stem: str) -> re.Match[str] | None:
    return next((found for found in _QUANT.finditer(stem) if found.end() == len(stem)), None)


def tagged(id: str) -> str:
    """A model's name as Ollama's clients know it: always with a tag."""
    return id if ":" in id else id + LATEST


def choose(candidates: Sequence[Group], quant: str | None) -> Group | None:
    """The version whose name ends with the wanted text; without one, the usual version."""
    for wish in _QUANT_PREFERENCE if quant is None else (quant.lower(),):
        fitting = [group for group in candidates if _ends_with(group.stem.lower(), wish)]
        if fitting:
            return min(fitting, key=lambda group: (group.label.lower() != wish, len(group.stem), group.stem))
    return candidates[0] if quant is None and candidates else None


def _ends_with(stem: str, wish: str) -> bool:
    return stem == wish or (stem.endswith(wish) and stem[-len(wish) - 1] in "-._")


def projector_for(group: Group, projectors: Iterable[str], *, is_alone: bool) -> str | None:
    """The projector that bears the model's name; any, if there is no other model it could belong to."""
    wanted = {group.stem.lower(), without_quant(group.stem).lower()}
    ranked = []
    for name in projectors:
        bare = _PROJECTOR.sub("-", posixpath.basename(name)[: -len(".gguf")]).strip("-._").lower()
        is_exact = bare == group.stem.lower()
        is_own = bool({bare, without_quant(bare)} & wanted)
        if is_own or is_alone:
            quant = "" if is_exact else (quant_of(bare) or "").lower()
            order = _PROJECTOR_PREFERENCE.index(quant) if quant in _PROJECTOR_PREFERENCE else len(_PROJECTOR_PREFERENCE)
            ranked.append((not is_own, order, name))
    return min(ranked)[2] if ranked else None


def is_alone(group: Group, others: Iterable[Group]) -> bool:
    """Whether all of these are versions of one model."""
    return {without_quant(other.stem).lower() for other in others} <= {without_quant(group.stem).lower()}
