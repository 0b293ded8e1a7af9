"""Starts a server with the flags of llama-server's tests: ``python -m bench.compat.launch everwarm|llama-server FLAGS``.

The tests name models by where they can be downloaded; tiny models of the same kind are used instead. llama-server's flags
are parsed by its own parser, in the wheel. Those that Everwarm refuses are left out and named on standard error.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from bench.compat.stand_ins import stand_in
from everwarm.cli.flags.llama_flags import ROWS, our_line
from everwarm.cli.flags.serve_options import ServeOptions
from everwarm.errors import BadRequest

Flag = tuple[str, ...]  # with its value, where it has one
_N_VALUES = {name: row.n_values for row in ROWS for name in row.names}
_SERVER, _HEAD = 12, 16  # LLAMA_EXAMPLE_SERVER; bytes of a Python object before what it holds


def main() -> None:
    flags = with_stand_ins(parsed(sys.argv[2:]))
    (run_everwarm if sys.argv[1] == "everwarm" else run_llama_server)(flags)


def parsed(args: Sequence[str]) -> list[Flag]:
    rest, flags = deque(args), []
    while rest:
        name = rest.popleft()
        n_values = _N_VALUES.get(name.replace("_", "-"), 0)
        flags.append((name, *(rest.popleft() for _ in range(n_values))))
    return flags


def with_stand_ins(flags: list[Flag]) -> list[Flag]:
    given = {flag[0]: flag[1] for flag in flags if len(flag) > 1}
    if "--hf-repo" not in given:
        return flags
    found = stand_in(given["--hf-repo"], given.get("--hf-file"))
    ours: list[Flag] = [("--model", str(found.model))]
    if found.projector is not None and ("--no-mmproj",) not in flags:
        ours.append(("--mmproj", str(found.projector)))
    return ours + [flag for flag in flags if flag[0] not in ("--hf-repo", "--hf-file")]


def run_everwarm(flags: list[Flag]) -> None:
    """Nothing is kept from one test for the next. What llama-server does by itself is asked for: slots have
    shares of the context, every page may call, and there are no metrics unless a flag wants them."""
    args = [str(Path(sys.executable).parent / "everwarm"), "serve", "--disk-cache", "0"]
    args += [] if ("--kv-unified",) in flags else ["--no-kv-unified"]
    args += [] if ("--metrics",) in flags else ["--no-metrics"]
    args += [] if any(flag[0] == "--cors-origins" for flag in flags) else ["--cors-origins", "*"]
    for flag in flags:
        try:
            our_line(flag, ServeOptions)
        except BadRequest as error:
            print(f"left out: {' '.join(flag)}: {error}", file=sys.stderr)
            continue
        args += flag
    os.execv(args[0], args)


def run_llama_server(flags: list[Flag]) -> None:
    import xllamacpp

    module = sys.modules["xllamacpp.xllamacpp"].__file__
    parse = ctypes.CDLL(str(module))._Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E
    parse.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    parse.restype = ctypes.c_bool
    words = [b"llama-server", *(word.encode() for flag in flags for word in flag)]
    params = xllamacpp.CommonParams()
    if not parse(len(words), (ctypes.c_char_p * (len(words) + 1))(*words), id(params) + _HEAD, _SERVER, None):
        raise SystemExit("llama-server does not take these flags")
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.warmup = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os._exit(0)


if __name__ == "__main__":
    main()
