"""``everwarm cache``: list what is kept on disk, check it, free space, and move it to other machines.

Parses, calls one function and prints the result. Only ``verify`` loads libllama.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from everwarm.cli.cache_output import (
    folder_facts,
    live_nodes,
    live_tree,
    object_facts,
    print_facts,
    print_folder,
    print_report,
    readable,
    report_facts,
    stored_tree,
)
from everwarm.config import cache_directory, parse_bytes, parse_duration, require, size_text
from everwarm.errors import BadRequest
from everwarm.gateway.client import Client
from everwarm.state.tools import bundle, inventory
from everwarm.state.tools.inventory import Folder, Tick, inspect

cache = cyclopts.App(
    name="cache",
    help="""List what is kept on disk, check it, free space, and move it to other machines.

    `everwarm serve` keeps the states of conversations in a state directory, one folder per model. `ls` lists them, `show`
    shows one in detail, `tree` shows what they share, also in a running server. `verify` checks every byte and recomputes
    states to compare them. `prune` frees space. `export` and `import` move states to another machine with the same model
    file. All but `prune` and `import` may run beside a server.
    """,
)

StateDir = Annotated[
    Path | None, Parameter(help="the state directory; default: everwarm/states in the user's cache directory")
]
FolderName = Annotated[
    str | None,
    Parameter(name=["--folder", "--model-folder"], help="only folders or models whose name begins with this"),
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="print JSON instead of text")]

MAX_LIMIT = 1_000_000


@cache.command
def ls(*, folder: FolderName = None, json: AsJson = False, state_dir: StateDir = None) -> None:
    """List what is kept: the conversation, its size, when it was last used, and the seconds it saves."""
    directory = _directory(state_dir)
    found = [inventory.read_folder(path) for path in inventory.choose_folders(directory, folder)]
    foreign = inventory.foreign_folders(directory) if folder is None else []
    if json:
        _print_json(
            {
                "state_dir": str(directory),
                "folders": [folder_facts(each) for each in found],
                "other_formats": [path.name for path in foreign],
            }
        )
        return
    console = Console()
    for each in found:
        print_folder(console, each, time.time())
    for path in foreign:
        console.print(f"{path.name}: another format; `everwarm cache prune --all` removes it", highlight=False)
    if not found and not foreign:
        console.print(f"nothing is kept in {directory}", markup=False, highlight=False)


@cache.command
def show(name: str, *, json: AsJson = False, state_dir: StateDir = None) -> int:
    """Show one object: what it is, what it needs, its digests, and whether it is intact. Exits with 1 if it is not.

    Parameters
    ----------
    name
        The beginning of an object's name or key (`ls` shows keys), or the path of a file, such as a.bin.checkpoints of a
        slot.
    """
    path = Path(name)
    if not path.is_file():
        read = [inventory.read_folder(each) for each in inventory.folders(_directory(state_dir))]
        path = inventory.find_one(read, name).path
    inspected = inspect(path)
    facts = object_facts(inspected)
    if json:
        _print_json(facts)
    else:
        print_facts(Console(), facts)
    return 0 if inspected.is_whole else 1


@cache.command
def tree(
    *,
    url: str | None = None,
    api_key: str | None = None,
    model: str | None = None,
    limit: int = 1000,
    folder: FolderName = None,
    state_dir: StateDir = None,
) -> None:
    """Show what is kept as a tree: conversations share their prefixes, and branch where they differ.

    Parameters
    ----------
    url
        The address of a running server, such as http://127.0.0.1:8080, to show all that it keeps on the device, in RAM and
        on disk. Without it the state directory is read. A server shows text only if it was started with --cache-text.
    api_key
        The server's API key.
    model
        Which of the server's models; default: the only one, or one that is loaded.
    limit
        The largest number of nodes to show of a server.
    """
    require(1 <= limit <= MAX_LIMIT, f"--limit is {limit}; give 1 to {MAX_LIMIT}")
    console = Console()
    if url is not None:
        require(folder is None and state_dir is None, "--url asks a server; leave out --folder and --state-dir")
        nodes, n_total = live_nodes(Client(url, api_key), model, limit)
        console.print(live_tree(nodes, url), soft_wrap=True)
        if n_total > len(nodes):
            console.print(f"{n_total - len(nodes)} more are not shown; give a greater --limit", highlight=False)
        return
    directory = _directory(state_dir)
    found = [inventory.read_folder(path) for path in inventory.choose_folders(directory, folder)]
    for each in found:
        console.print(stored_tree(each), soft_wrap=True)
    if not found:
        console.print(f"nothing is kept in {directory}", markup=False, highlight=False)


@cache.command
def verify(
    *,
    model: Path | None = None,
    limit: int | None = None,
    folder: FolderName = None,
    json: AsJson = False,
    state_dir: StateDir = None,
) -> int:
    """Check every byte by its digest, and recompute states to compare. Exits with 1 if anything is damaged or differs.

    A clean state must equal a cold reading byte for byte. Any other is compared by the logits of the next token; the
    largest difference is reported. What is damaged or differs is moved into the folder's `quarantine`, unless a running
    server holds it. Recomputing takes as long as the prompts took.

    Parameters
    ----------
    model
        The GGUF file that the states belong to; default: the one they came from, if it is still there.
    limit
        Recompute at most so many states of each folder, the last used first; 0: only digests.
    """
    require(limit is None or 0 <= limit <= MAX_LIMIT, f"--limit is {limit}; give 0 to {MAX_LIMIT}")
    directory = _directory(state_dir)
    found = [inventory.read_folder(path) for path in inventory.choose_folders(directory, folder)]
    from everwarm.engine.verify import check_up  # late, because the engine takes a moment to load

    with _progress() as begin:
        reports = check_up(found, model, limit, begin)
    if json:
        _print_json([report_facts(report) for report in reports])
    else:
        for report in reports:
            print_report(Console(), report)
        if not reports:
            Console().print(f"nothing is kept in {directory}", markup=False, highlight=False)
    return 0 if all(report.is_well for report in reports) else 1


@cache.command
def prune(
    *,
    keep: str | None = None,
    older_than: str | None = None,
    everything: Annotated[bool, Parameter(name="--all", negative=())] = False,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    folder: FolderName = None,
    state_dir: StateDir = None,
) -> None:
    """Free space: removes states with the KV that only they need, so that all others stay usable. Stop the server first.

    Also removes what cannot be used: damaged objects, and KV that no state needs.

    Parameters
    ----------
    keep
        Keep at most so much, like 10GiB, over all folders; removes what saves least time for its size first.
    older_than
        Remove what was not used for so long, like 30d, 12h or 90m.
    everything
        Remove whole folders, also those of other format versions.
    dry_run
        Only show what would be removed.
    """
    directory = _directory(state_dir)
    if everything:
        require(keep is None and older_than is None, "--all removes everything; leave out --keep and --older-than")
        return _prune_folders(directory, folder, dry_run)
    require(keep is not None or older_than is not None, "say what may go: --keep 10GiB, --older-than 30d, or --all")
    now = time.time()
    keep_bytes = None if keep is None else parse_bytes(keep)
    used_since = None if older_than is None else now - parse_duration(older_than)
    paths = inventory.choose_folders(directory, folder)
    with contextlib.nullcontext() if dry_run else inventory.holding(paths):
        found = [inventory.read_folder(path) for path in paths]
        doomed = inventory.choose_to_prune(found, now, keep_bytes=keep_bytes, used_since=used_since)
        if not dry_run:
            inventory.remove_objects(doomed)
    n_states = sum(item.is_state for item in doomed)
    size = size_text(sum(item.size for item in doomed))
    print(
        f"{'would remove' if dry_run else 'removed'} {n_states} states and {len(doomed) - n_states} other files: {size}"
    )


def _prune_folders(directory: Path, folder: str | None, dry_run: bool) -> None:
    paths = inventory.choose_folders(directory, folder)
    if folder is None:
        paths += inventory.foreign_folders(directory) + inventory.leftovers(directory)
    sizes = [inventory.folder_size(path) for path in paths]
    if not dry_run:
        with inventory.holding(paths):
            for path in paths:
                inventory.remove_folder(path)
    verb = "would remove" if dry_run else "removed"
    for path, size in zip(paths, sizes, strict=True):
        print(f"{verb} {path.name}: {size_text(size)}")
    if not paths:
        print(f"nothing is kept in {directory}")


@cache.command
def export(file: Path, *names: str, folder: FolderName = None, state_dir: StateDir = None) -> None:
    """Write states and all that they need into one tar file, for `import` on another machine. They contain your prompts.

    Parameters
    ----------
    file
        The file to write; it must not exist yet.
    names
        The beginnings of the states' names or keys (`ls` shows keys); default: all states of the folder.
    """
    read = [inventory.read_folder(path) for path in inventory.choose_folders(_directory(state_dir), folder)]
    chosen, states = _chosen(read, names)
    things = bundle.closure(chosen, states)
    if not things:
        raise BadRequest(f"{chosen.path.name} keeps no state that is whole")
    with _progress() as begin:
        size = bundle.write_bundle(file, chosen, things, begin("writing", sum(thing.size for thing in things)))
    n_states = sum(thing.header.kind == "state" for thing in things)
    print(f"{file}: {n_states} states of {readable(chosen.title)}, {size_text(size)}")


def _chosen(read: Sequence[Folder], names: Sequence[str]) -> tuple[Folder, list[str]]:
    """One folder, because a file holds the states of one model, and the names of its states."""
    things = [inventory.find_one(read, name) for name in names]
    kv = next((thing.name for thing in things if thing.header.kind != "state"), None)
    require(kv is None, f"{kv} is KV, which goes along with the states that need it: name one of those")
    places = {thing.path.parent for thing in things}
    found = [each for each in read if each.path in places] if names else [each for each in read if each.objects]
    if len(found) != 1:
        shown = ", ".join(f"{each.path.name} ({readable(each.title)})" for each in found) or "nothing is kept"
        raise BadRequest(f"a file holds the states of one model; choose one with --folder: {shown}")
    return found[0], [thing.name for thing in things]


@cache.command(name="import")
def import_(file: Path, *, state_dir: StateDir = None) -> None:
    """Add states that `export` wrote. Everything is verified before anything is written.

    Digests show that nothing was damaged on the way, not who made it: import only from sources that you would trust with a
    model, or recompute the states with `everwarm cache verify`.

    Parameters
    ----------
    file
        A file that `everwarm cache export` wrote.
    """
    directory = _directory(state_dir)
    with bundle.open_bundle(file) as fd, _progress() as begin:
        size = file.stat().st_size
        found = bundle.check_bundle(fd, directory, begin("verifying", size))
        done = bundle.write_members(fd, found, directory, begin("writing", size))
    print(f"{done.n_new} objects, {size_text(done.n_bytes)}, into {done.folder}; {done.n_known} were there already")


def _directory(state_dir: Path | None) -> Path:
    return state_dir.expanduser() if state_dir is not None else cache_directory() / "states"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int], Tick]]:
    """A progress bar for each piece of work, on standard error if that is a terminal, removed afterwards."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield lambda text, total: partial(progress.advance, progress.add_task(readable(text), total=total))


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())
