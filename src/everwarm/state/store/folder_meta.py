"""What a model's folder says of itself: which model, in which ways it was opened, and how fast it reads.

For people and for the tools that look at a folder; an engine needs none of it but the speed. A file that cannot be
decoded counts as none.

The folders of other models, builds and KV types are read once, when a directory is opened: their states cannot be used,
but a reply can say that there are some. Only names of lineages are compared, and those depend on the namespace. Every
failure means: nothing known.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec

from everwarm.config import ContextOptions, ModelOptions
from everwarm.errors import EverwarmError
from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys, root_key
from everwarm.state.store.files import Files
from everwarm.state.store.index import INDEX, peek_states
from everwarm.state.store.object import MAJOR

ABOUT = "about.json"
MAX_ABOUT = 64 << 10
MAX_WAYS = 8
MIN_SECONDS_PER_TOKEN = 1e-9
MAX_SECONDS_PER_TOKEN = 3600.0
MAX_FOLDERS = 4


class Way(msgspec.Struct, frozen=True):
    """How an engine opened its model: bits depend on the threads, and a window's on how many sequences share it."""

    model: ModelOptions
    context: ContextOptions


class FolderAbout(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: str
    model: str = ""  # the file's name
    path: str = ""
    description: str = ""
    seconds_per_token: float | None = None  # None: never measured
    ways: tuple[Way, ...] = ()  # the latest first

    def without_paths(self) -> FolderAbout:
        """A copy without paths, which may leave this machine or come from another."""
        ways = tuple(Way(replace(way.model, lora=()), way.context) for way in self.ways)
        return msgspec.structs.replace(self, path="", ways=ways)


def folder_name(fingerprint: str) -> str:
    """The name of a model's folder in the state directory."""
    return f"v{MAJOR}-{root_key(fingerprint, '')[:24]}"


def decode_about(data: bytes) -> FolderAbout | None:
    try:
        about = msgspec.json.decode(data, type=FolderAbout)
    except (msgspec.MsgspecError, EverwarmError, UnicodeError):
        return None
    speed = about.seconds_per_token
    if speed is not None and not MIN_SECONDS_PER_TOKEN <= speed <= MAX_SECONDS_PER_TOKEN:
        about = msgspec.structs.replace(about, seconds_per_token=None)
    return msgspec.structs.replace(about, ways=about.ways[:MAX_WAYS])


def encode_about(about: FolderAbout) -> bytes:
    return msgspec.json.format(msgspec.json.encode(about))


def read_about(folder: Path) -> FolderAbout | None:
    """None: there is none, or it is about another folder."""
    try:
        fd = Files().open(folder / ABOUT)
    except OSError:
        return None
    try:
        about = decode_about(os.pread(fd, MAX_ABOUT, 0))
    except OSError:
        return None
    finally:
        os.close(fd)
    return about if about is not None and folder_name(about.fingerprint) == folder.name else None


def write_about(folder: Path, about: FolderAbout, files: Files | None = None) -> None:
    (files or Files()).write(folder / ABOUT, [encode_about(about)])


ForeignStates = dict[str, dict[str, int]]  # names of states by fingerprint, each with its length in items


def n_foreign_items(states: ForeignStates, namespace: str, prompt: Prompt) -> int:
    """The length of the longest prefix of a prompt that is kept for another fingerprint."""
    longest = 0
    for fingerprint, kept in states.items():
        lengths = {n for n in kept.values() if 0 < n <= len(prompt)}
        named = keys(root_key(fingerprint, namespace), prompt, lengths)
        longest = max(longest, *(n for n, key in named.items() if kept.get(key) == n), 0)
    return longest


def find_foreign_states(directory: Path, fingerprint: str) -> ForeignStates:
    """Those of the folders beside this fingerprint's own, the latest ones."""
    try:
        folders = [path for path in directory.iterdir() if path.name != folder_name(fingerprint) and path.is_dir()]
        folders.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return {}
    found = {}
    for folder in folders[:MAX_FOLDERS]:
        about = read_about(folder)
        if about is not None:
            found[about.fingerprint] = peek_states(folder / INDEX)
    return {other: states for other, states in found.items() if states}
