"""Which prompts lie on disk for another model, build or KV type: none of it can be used, but it can be said.

Looked at once, when a directory is opened. Only names are compared, and a name holds the namespace: nobody learns of
another's. Every failure means: nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key
from everwarm.state.store.folder_meta import folder_name, read_about
from everwarm.state.store.index import INDEX, peek_states

MAX_FOLDERS = 4


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Names of states by fingerprint, each with its length in items."""

    states: dict[str, dict[str, int]]

    def n_known(self, namespace: str, prompt: Prompt) -> int:
        """How many of a prompt's first items somebody has kept for another fingerprint."""
        return max((self._n_known(fingerprint, namespace, prompt) for fingerprint in self.states), default=0)

    def _n_known(self, fingerprint: str, namespace: str, prompt: Prompt) -> int:
        kept = self.states[fingerprint]
        named = keys(root_key(fingerprint, namespace), prompt, {n for n in kept.values() if 0 < n <= len(prompt)})
        return max((n for n, key in named.items() if kept.get(key) == n), default=0)


NOWHERE = Elsewhere({})


def look_elsewhere(directory: Path, fingerprint: str) -> Elsewhere:
    """The folders beside this fingerprint's own, the latest ones."""
    try:
        folders = [path for path in directory.iterdir() if path.name != folder_name(fingerprint) and path.is_dir()]
        folders.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return NOWHERE
    found = {}
    for folder in folders[:MAX_FOLDERS]:
        about = read_about(folder)
        if about is not None:
            found[about.fingerprint] = peek_states(folder / INDEX)
    return Elsewhere({other: states for other, states in found.items() if states})
