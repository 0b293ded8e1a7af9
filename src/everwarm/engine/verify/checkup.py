"""Looking over a state directory: every object by its digests, states by reading them again; what is wrong is put aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from everwarm.engine.verify.verify_states import Finding, Opening, find_model, replay_states
from everwarm.errors import BadRequest, ModelError
from everwarm.state.tools.inventory import Broken, Folder, Tick, check_digests, quarantine

Begin = Callable[[str, int], Tick]  # hears of a new piece of work and its size; answers with whom to tell of progress


@dataclass(frozen=True, slots=True)
class Report:
    folder: Folder
    broken: tuple[Broken, ...]
    findings: tuple[Finding, ...]
    not_replayed: str  # why no state was read again; "": they were
    n_left: int  # states that could have been read again, beyond the limit
    not_put_aside: str = ""  # why what is wrong lies where it was; "": it does not

    @property
    def wrong(self) -> tuple[str, ...]:
        """What no engine should ever use."""
        lost = (broken.path.name for broken in self.broken if broken.is_lost)
        return (*lost, *(finding.name for finding in self.findings if finding.is_wrong))

    @property
    def is_well(self) -> bool:
        return not self.broken and not self.wrong


def check_up(folders: Sequence[Folder], model: Path | None, limit: int | None, begin: Begin) -> list[Report]:
    """A given model must be that of at least one folder."""
    openings: dict[Path, Opening] = {}
    reasons: dict[Path, str] = {}
    for folder in folders:
        try:
            openings[folder.path] = find_model(folder, model)
        except BadRequest as error:
            reasons[folder.path] = str(error)
    if model is not None and not openings:
        raise BadRequest(next(iter(reasons.values()), "nothing is kept of any model"))
    return [
        _check_folder(folder, openings.get(folder.path), reasons.get(folder.path, ""), limit, begin)
        for folder in folders
    ]


def _check_folder(folder: Folder, opening: Opening | None, reason: str, limit: int | None, begin: Begin) -> Report:
    broken = _broken(folder, begin)
    bad = {item.path.name for item in broken}
    whole = [lineage for lineage in folder.lineages() if not lineage.missing]
    whole = [lineage for lineage in whole if not bad & {lineage.state.name, *(kv.name for kv in lineage.kv)}]
    chosen = whole[:limit]
    findings: list[Finding] = []
    if opening is not None and chosen:
        n_items = sum(lineage.state.header.n_items for lineage in chosen)
        try:
            findings = replay_states(opening, chosen, begin(f"reading again with {opening.path.name}", n_items))
        except (ModelError, BadRequest) as error:
            reason = str(error)
    report = Report(folder, broken, tuple(findings), reason, len(whole) - len(chosen))
    return replace(report, not_put_aside=quarantine(folder.path, report.wrong))


def _broken(folder: Folder, begin: Begin) -> tuple[Broken, ...]:
    tick = begin(f"digests of {folder.path.name}", sum(thing.size for thing in folder.objects.values()))
    found = list(folder.broken.values())
    for thing in folder.objects.values():
        why = check_digests(thing.path, tick)
        if why is not None:
            found.append(Broken(thing.path, thing.size, why))
    return tuple(found)
