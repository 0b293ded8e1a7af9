"""The remote tier: objects shared by many servers through a store that need not be trusted.

    <key's id>/<model's folder>/kv-….ew · state-….ew       an object, and its MAC behind it
    <key's id>/<model's folder>/at-… · near-…              pointers (see ``pointer``), each with its MAC

A hit takes two round trips (pointers; everything they name at once), a miss one, and a repeated miss none. Every failure
is a miss. One thread talks to the store, another hashes what is written. A caller waits at most ``wait_s`` for a store that
does not answer, and only one does: then the circuit breaker opens, until a trial in the background succeeds. Knows no tree
and no libllama.

After a failure no request is sent until a trial in the background succeeds (``CircuitBreaker``). All pieces of an
object are requested at once and come in any order (``Download``); reading a section waits for the pieces it needs, and
no longer than ``patience_s``. The MAC is checked before the header is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from everwarm.prompt.prompt import Prompt
from everwarm.state.lineage import keys
from everwarm.state.remote.bucket import Bucket, BucketPiece, StoreFault
from everwarm.state.remote.pointer import (
    MAC_BYTES,
    MAX_OBJECT,
    MAX_POINTER,
    Mac,
    Parcel,
    Pointer,
    decode_signed,
    encode_signed,
    probes,
)
from everwarm.state.store.folder_meta import folder_name
from everwarm.state.store.object import Damaged, ObjectHeader, ObjectPart, ObjectReader, are_sound, encode, name_of
from everwarm.state.tier import Dropped, InSpaces, OnPrompts, OpenObject, PartReader, Selection, SharedTier
from everwarm.types import Blob

log = logging.getLogger("everwarm.remote")

T = TypeVar("T")
Begin = Callable[[int, int], Future[BucketPiece | None]]  # fetches these bytes; None: there is no such object

# downloads
PIECE = 8 << 20
N_PIECES = 16  # at once
SLACK = 1 << 20  # headers of the same object may differ in length
FIRST_GUESS = 1 << 20  # of the size of an object that no pointer names
# waiting for a store
ANSWER_S = 0.25  # how long a caller waits for the first byte
LATER = 4  # times as long, for a store that has just answered and has many requests at once now
MOST_FAILURES = 3  # in a row; one is enough if a request had to wait for it
FIRST_OPEN_S, MOST_OPEN_S, JITTER = 2.0, 60.0, 0.25  # how long the circuit breaker stays open
# writing
N_WRITERS = 2
MAX_QUEUED = 256 << 20  # bytes that wait to be written stay in RAM, beyond its budget
SMALL = 64 << 10  # written without asking first
WRITE_S = 30.0  # for one request, and more for many bytes
SLOWEST_WRITE = 1e6  # bytes per second
KEEP_TRYING_S = 30.0  # a parcel waits so long for a store that does not answer
FLUSH_S, DEAD_S = 20.0, 3.0  # at most, in all; and while the store does not answer
# what is remembered
MISS_S = 5.0  # a name that was not there is not looked up again
KNOWN_S = 86_400.0  # what was there is taken to be there
STALE_S = 3 * 86_400.0  # what is older is written again, so that no lifecycle rule takes it while it is used
MAX_REMEMBERED = 1 << 16


class Download:
    def __init__(self, begin: Begin, size: int, patience_s: float) -> None:
        self._begin = begin
        self._until = time.monotonic() + patience_s
        self.size = size
        self._pieces = self._ask()

    def _ask(self) -> dict[int, Future[BucketPiece | None]]:
        return {at: self._begin(at, min(at + PIECE, self.size)) for at in range(0, self.size, PIECE)}

    def cancel(self) -> None:
        for future in self._pieces.values():
            future.cancel()

    def reader(self, name: str, mac: Mac) -> ObjectReader:
        """``FileNotFoundError``: it is gone. ``Damaged``: it was not written under this name with this key."""
        size = self._answer(0).size
        if size != self.size:  # another writer's, of another size: request it again
            self.cancel()
            if not MAC_BYTES < size <= 2 * self.size + SLACK:
                raise Damaged(f"it has {size} bytes, and about {self.size} were announced")
            self.size = size
            self._pieces = self._ask()
        return _Fetched(self, name, mac)

    def fill(self, view: memoryview, offset: int) -> None:
        into = np.frombuffer(view, np.uint8)
        done = 0
        while done < len(into):
            at = (offset + done) // PIECE * PIECE
            data = np.frombuffer(self._answer(at).data, np.uint8)[offset + done - at :]
            n = min(len(data), len(into) - done)
            if n <= 0:
                raise Damaged("it ends early")
            into[done : done + n] = data[:n]
            done += n

    def _answer(self, at: int) -> BucketPiece:
        future = self._pieces.get(at)
        if future is None:
            raise Damaged("it is too short")
        try:
            piece = future.result(max(0.0, self._until - time.monotonic()))
        except CancelledError:
            raise TimeoutError("the store was closed") from None
        if piece is None:
            raise FileNotFoundError
        return piece


class _Fetched(ObjectReader):
    def __init__(self, download: Download, name: str, mac: Mac) -> None:
        self._download = download
        self._name = name
        self._mac = mac
        super().__init__(-1, 0, download.size - MAC_BYTES)

    def _raw_head(self) -> tuple[int, bytes]:
        length, head = super()._raw_head()
        own = bytearray(MAC_BYTES)
        self._fill(memoryview(own), self._size)
        if not self._mac.is_right(bytes(own), self._name, self._size, head):
            raise Damaged("its MAC is not one of this key, name and model")
        return length, head

    def _fill(self, view: memoryview, offset: int) -> None:
        self._download.fill(view, offset)


@dataclass(slots=True)
class CircuitBreaker:
    is_open: bool = False
    n_failures: int = 0  # in a row
    _open_s: float = FIRST_OPEN_S

    def failed(self, *, slowly: bool, luck: float) -> float | None:
        """A request failed. Returns the seconds until the first trial; None: keep using the store. ``luck`` is random,
        from 0 to 1."""
        self.n_failures += 1
        if self.is_open or not (slowly or self.n_failures >= MOST_FAILURES):
            return None
        self.is_open = True
        return self._wait(luck)

    def failed_again(self, luck: float) -> float:
        """A trial failed, too. Returns the seconds until the next."""
        self._open_s = min(MOST_OPEN_S, 2 * self._open_s)
        return self._wait(luck)

    def succeeded(self) -> None:
        """The store has answered, to a trial or to a request."""
        self.is_open = False
        self.n_failures = 0
        self._open_s = FIRST_OPEN_S

    def _wait(self, luck: float) -> float:
        return self._open_s * (1 + JITTER * (2 * luck - 1))


@dataclass(slots=True)
class RemoteCounts:
    n_hits: int = 0
    n_misses: int = 0
    n_bytes_read: int = 0
    n_bytes_written: int = 0
    n_failures: int = 0
    n_refused: int = 0  # objects whose MAC or bytes were not right
    n_given_up: int = 0  # parcels that were not written


class RemoteTier(SharedTier):
    is_on = True

    def __init__(
        self,
        bucket: Bucket,
        key: bytes,
        fingerprint: str,
        is_sound: Callable[[Blob], bool] = lambda _: True,
        wait_s: float = ANSWER_S,
    ) -> None:
        self._bucket = bucket
        self._mac = Mac(key, fingerprint)
        self._folder = f"{self._mac.key_id}/{folder_name(fingerprint)}"
        self._is_sound = is_sound
        self.wait_s = wait_s
        self.counts = RemoteCounts()
        self.breaker = CircuitBreaker()
        self.answer_s = 0.02  # how long a round trip takes, until measured
        self._known: dict[str, float] = {}  # names, and until when they are taken to be there
        self._missed: dict[str, float] = {}
        # lineage → its items, the names of its pointers, and its space
        self._announced: dict[str, tuple[int, tuple[str, ...], str]] = {}
        self._lock = threading.RLock()
        self._n_waiting = 0
        self._writing: set[Future[None]] = set()
        self._packer = ThreadPoolExecutor(1, "everwarm-remote-pack")
        self._loop = asyncio.new_event_loop()
        self._pieces = asyncio.Semaphore(N_PIECES)
        self._writers = asyncio.Semaphore(N_WRITERS)
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="everwarm-remote", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # at its end what still runs is cancelled
            runner.run(self._closed.wait())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()
        self._packer.shutdown(cancel_futures=True)

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # it is closed
            work.close()
            raise StoreFault("the store is closed") from None

    def stats(self) -> dict[str, float]:
        shown: dict[str, float] = {f"remote_{name}": value for name, value in dataclasses.asdict(self.counts).items()}
        return {**shown, "remote_breaker_is_open": self.breaker.is_open, "remote_bytes_waiting": self._n_waiting}

    # questions

    def find(self, root: str, prompt: Prompt, ends: Iterable[int], *, least: int, most: int) -> Pointer | None:
        """The deepest state that a pointer names for these items, of more than ``least`` and at most ``most`` of them.
        ``ends`` are the prompt's boundaries."""
        exact, cells = probes(ends, least, most)
        named = keys(root, prompt, {*exact, *(at for _, at in cells)})
        names = [f"at-{named[at][:32]}" for at in exact]
        names += [f"near-{grid}-{named[at][:32]}" for grid, at in cells]
        wanted = [name for name in names if not self._is_missed(name)]
        if not wanted or self.breaker.is_open:
            return None
        found = [pointer for pointer in self._ask(wanted) if least < pointer.n_items <= most]
        named = keys(root, prompt, {pointer.n_items for pointer in found})
        right = [pointer for pointer in found if named[pointer.n_items] == pointer.key]
        if not right:
            self.counts.n_misses += 1
        return max(right, key=lambda pointer: pointer.n_items, default=None)

    def _ask(self, names: Sequence[str]) -> list[Pointer]:
        began = time.monotonic()
        requests = [self._begin(self._pointer_at(name)) for name in names]
        done, late = wait(requests, self.wait_s)
        for future in late:
            future.cancel()
        if late:
            self._fail(TimeoutError(f"no answer within {self.wait_s * 1000:.0f} ms"))
        else:
            self.answer_s = 0.7 * self.answer_s + 0.3 * (time.monotonic() - began)
        return [pointer for future in done if not future.cancelled() and (pointer := future.result()) is not None]

    async def _pointer_at(self, name: str) -> Pointer | None:
        try:
            piece = await self._get(name, 0, MAX_POINTER)
            if piece is None:
                self._remember(self._missed, name, MISS_S)
                return None
            return decode_signed(bytes(piece.data), name, self._mac)
        except Damaged as error:
            self._refuse(name, error)
        except (StoreFault, TimeoutError) as error:
            self._fail(error)
        return None

    def note_declined(self) -> None:
        """Records that what was found is not worth fetching."""
        self.counts.n_misses += 1

    def answers_within(self, seconds: float) -> bool:
        """Whether a state can be expected within this time: finding it and fetching it take a round trip each."""
        return not self.breaker.is_open and seconds > 2 * self.answer_s

    async def _get(self, name: str, start: int, stop: int, more_s: float = 0.0) -> BucketPiece | None:
        """None: it is not there."""
        wait_s = min(LATER * self.wait_s, more_s) if more_s else self.wait_s
        try:
            piece = await self._bucket.get(f"{self._folder}/{name}", start, stop, wait_s, more_s)
        except FileNotFoundError:
            self.breaker.succeeded()
            return None
        self.breaker.succeeded()
        self.counts.n_bytes_read += len(piece.data)
        return piece

    # reading

    def download(self, name: str, size: int, patience_s: float) -> Download:
        """Begin to fetch an object, all of its pieces at once; the size is only a guess."""

        async def piece(start: int, stop: int) -> BucketPiece | None:
            async with self._pieces:
                return await self._get(name, start, stop, patience_s)

        return Download(lambda start, stop: self._begin(piece(start, stop)), min(size, MAX_OBJECT), patience_s)

    @contextlib.contextmanager
    def fetching(
        self, pointer: Pointer, n_kv: int, patience_s: float, nearer: OpenObject, names: frozenset[str]
    ) -> Iterator[OpenObject]:
        """The objects of a state, without KV of its first ``n_kv`` items: everything that no ``nearer`` tier has is
        requested at once. Those with these names are read from there. On leaving, pending downloads are not waited for."""
        sizes = {pointer.name: pointer.size} | {need.name: need.size for need in pointer.needs if need.reach > n_kv}
        downloads = {name: self.download(name, size, patience_s) for name, size in sizes.items() if name not in names}

        def open_object(name: str) -> contextlib.AbstractContextManager[PartReader]:
            if name in names:
                return nearer(name)
            download = downloads.pop(name, None) or self.download(name, FIRST_GUESS, patience_s)
            return self.reading(name, download)

        try:
            yield open_object
            self.counts.n_hits += 1
        except Damaged:
            self.counts.n_misses += 1
            raise
        finally:
            for download in downloads.values():
                download.cancel()

    @contextlib.contextmanager
    def reading(self, name: str, download: Download) -> Iterator[ObjectReader]:
        """An object with the right MAC; its sections are verified as they are read."""
        try:
            reader = download.reader(name, self._mac)
            if name_of(reader.header) != name:
                raise Damaged("it is another object than its name says")
            yield reader
        except (StoreFault, TimeoutError) as error:
            self._fail(error)
            raise Damaged(f"the store did not give it: {error}") from None
        except FileNotFoundError:
            with self._lock:
                self._known.pop(name, None)
            raise Damaged("it is gone") from None
        except Damaged as error:
            if not error.name:
                error.name = name
                self._refuse(name, error)
            raise
        self._remember(self._known, name, KNOWN_S)

    def _refuse(self, name: str, error: Damaged) -> None:
        self.counts.n_refused += 1
        log.warning("%s in the remote store is not used: %s", name, error)

    # writing

    def has(self, name: str) -> bool:
        """Whether the store has it, as far as this process knows."""
        return self._known.get(name, 0.0) > time.monotonic()

    def offer(self, parcel: Parcel) -> bool:
        """Write it in the background. False: too much waits already."""
        with self._lock:
            if self._n_waiting + parcel.size > MAX_QUEUED:
                self.counts.n_given_up += 1
                return False
            self._n_waiting += parcel.size
            self._later(self._write(parcel), parcel.size)
        return True

    def _later(self, work: Coroutine[Any, Any, None], size: int) -> None:
        future = self._begin(work)
        self._writing.add(future)
        future.add_done_callback(lambda done: self._ended(done, size))

    def _ended(self, future: Future[None], size: int) -> None:
        with self._lock:
            self._writing.discard(future)
            self._n_waiting -= size
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("a turn was not shared", exc_info=error)

    def flush(self, seconds: float = FLUSH_S) -> bool:
        """Waits until everything offered is stored or was given up: for a limited time, and briefly if the store is
        down."""
        with self._lock:
            left = set(self._writing)
        now = alive = time.monotonic()
        until = now + seconds
        while left and now < until and now - alive < DEAD_S:
            left = wait(left, min(0.1, until - now)).not_done
            now = time.monotonic()
            alive = alive if self.breaker.is_open else now
        return not left

    async def _write(self, parcel: Parcel) -> None:
        *kv, state = parcel.objects
        try:
            async with self._writers:
                await self._wait_for_the_store()
                for header, parts in kv:
                    await self._put(header, parts)
                await self._put(*state)
                for name in parcel.names:
                    data = encode_signed(parcel.pointer, name, self._mac)
                    await self._send(name, [data], over=True)
                    self._missed.pop(name, None)
        except (StoreFault, TimeoutError) as error:
            self.counts.n_given_up += 1
            self._fail(error)
            return
        except ValueError as error:
            self.counts.n_given_up += 1
            log.warning("a turn is not shared: %s", error)
            return
        space = parcel.objects[-1][0].space
        self._announced[parcel.pointer.key] = (parcel.pointer.n_items, parcel.names, space)
        while len(self._announced) > MAX_REMEMBERED:
            del self._announced[next(iter(self._announced))]

    async def _wait_for_the_store(self) -> None:
        until = time.monotonic() + KEEP_TRYING_S
        while self.breaker.is_open:
            if time.monotonic() > until:
                raise StoreFault("the store did not come back in time")
            await asyncio.sleep(0.1)

    async def _put(self, header: ObjectHeader, parts: Mapping[str, ObjectPart]) -> None:
        name = name_of(header)
        if self.has(name):
            return None
        size = sum(part.nbytes for part in parts.values())
        is_stale = False
        if size > SMALL:
            with contextlib.suppress(FileNotFoundError):
                age_s = await self._bucket.age_s(f"{self._folder}/{name}", time.time(), WRITE_S)
                if age_s < STALE_S:
                    return self._remember(self._known, name, KNOWN_S)
                is_stale = True
        pieces = await self._loop.run_in_executor(self._packer, self._packed, name, header, parts)
        await self._send(name, pieces, over=is_stale)
        self._remember(self._known, name, KNOWN_S)

    def _packed(self, name: str, header: ObjectHeader, parts: Mapping[str, ObjectPart]) -> list[bytes | memoryview]:
        if not are_sound(parts.values(), self._is_sound):
            raise ValueError(f"{name} is not what it was")
        pieces = [piece for piece in encode(header, parts) if len(piece)]
        size = sum(map(len, pieces))
        if size > MAX_OBJECT:
            raise ValueError(f"{name} has {size} bytes: more than one request can write")
        return [*pieces, self._mac.of(name, size, pieces[0])]

    async def _send(self, name: str, pieces: Sequence[bytes | memoryview], *, over: bool) -> None:
        size = sum(map(len, pieces))
        is_new = await self._bucket.put(f"{self._folder}/{name}", pieces, WRITE_S + size / SLOWEST_WRITE, over=over)
        self.breaker.succeeded()
        if is_new:
            self.counts.n_bytes_written += size

    def forget(self, what: Selection) -> Dropped:
        """Starts to drop the states that this process has announced. KV may belong to other servers and stays."""
        with self._lock, contextlib.suppress(StoreFault):
            before = [asyncio.wrap_future(future, loop=self._loop) for future in self._writing]
            self._later(self._forget(what, before), 0)
        return Dropped()

    def _chosen(self, what: Selection) -> set[str]:
        """The lineages to forget; some may not be announced."""
        match what:
            case OnPrompts():
                return what.keys(n_items for n_items, _, _ in self._announced.values())
            case tuple():
                return {kept.key for kept in what}
            case InSpaces():
                return {key for key, (*_, space) in self._announced.items() if what.has(space)}

    async def _forget(self, what: Selection, first: list[asyncio.Future[None]]) -> None:
        await asyncio.gather(*first, return_exceptions=True)  # what is still on its way would come back
        for key in self._chosen(what) & self._announced.keys():
            n_items, names, _ = self._announced.pop(key)
            for name in (*names, Pointer(key, n_items, 1).name):
                self._known.pop(name, None)
                await self._drop(name)

    async def _drop(self, name: str) -> None:
        try:
            await self._bucket.drop(f"{self._folder}/{name}", WRITE_S)
        except FileNotFoundError:
            pass
        except (StoreFault, TimeoutError) as error:
            self._fail(error)

    # what went wrong, and what is remembered

    def _fail(self, error: Exception) -> None:
        self.counts.n_failures += 1
        wait_s = self.breaker.failed(slowly=isinstance(error, TimeoutError), luck=random.random())
        if wait_s is not None:
            log.warning("the remote store is left alone for %.1f s: %s", wait_s, error or "no answer in time")
            with contextlib.suppress(StoreFault):
                self._begin(self._try_again(wait_s))

    async def _try_again(self, wait_s: float) -> None:
        while self.breaker.is_open:
            await asyncio.sleep(wait_s)
            try:
                await self._bucket.get(f"{self._folder}/trial", 0, 1, self.wait_s)
            except FileNotFoundError:
                break
            except (StoreFault, TimeoutError):
                wait_s = self.breaker.failed_again(random.random())
            else:
                break
        self.breaker.succeeded()
        log.info("the remote store answers again")

    def _is_missed(self, name: str) -> bool:
        return self._missed.get(name, 0.0) > time.monotonic()

    def _remember(self, what: dict[str, float], name: str, seconds: float) -> None:
        with self._lock:
            what.pop(name, None)
            what[name] = time.monotonic() + seconds
            while len(what) > MAX_REMEMBERED:
                del what[next(iter(what))]
