"""A pytest plugin for llama-server's tests: free ports, and no models that are downloaded before all tests."""

from __future__ import annotations

import socket
import sys
import types

sys.modules["wget"] = types.ModuleType("wget")  # imported by the tests; nothing is downloaded here


def pytest_collection_finish() -> None:
    import utils  # type: ignore[import-not-found]

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    begin = utils.ServerProcess.__init__

    def with_free_port(self: object) -> None:
        begin(self)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.server_port = probe.getsockname()[1]  # type: ignore[attr-defined]

    utils.ServerProcess.__init__ = with_free_port
