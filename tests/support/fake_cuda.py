"""A CUDA runtime that only keeps books."""

from __future__ import annotations

from dataclasses import dataclass, field

from everwarm.llama.system.pinned_memory import Runtime


@dataclass
class FakeCuda:
    """Remembers what is registered, as the CUDA runtime does; refuses with ``refusal`` if that is not 0."""

    refusal: int = 0
    registered: dict[int, tuple[int, int]] = field(default_factory=dict)
    last: int = 0

    def runtime(self) -> Runtime:
        return Runtime(self._register, self._unregister, self._last_error)

    def _register(self, address: int, size: int, flags: int) -> int:
        self.last = self.refusal
        if not self.refusal:
            self.registered[address] = (size, flags)
        return self.refusal

    def _unregister(self, address: int) -> int:
        self.last = 0 if self.registered.pop(address, None) else 713
        return self.last

    def _last_error(self) -> int:
        code, self.last = self.last, 0
        return code
