"""A clock that stands in for torch.npu where only times are asked for."""

from __future__ import annotations

from types import SimpleNamespace


class Clock:
    """Time passes only in `work`; events note when they were recorded."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda later: later.at - event.at
        return event

    def synchronize(self) -> None:
        self.waits += 1

    def work(self, ms: float, value: object = None) -> object:
        self.now += ms
        return value
