"""SIGTERM and Ctrl-C as a request to stop after the step at hand."""

import signal
import threading
from types import FrameType
from typing import Any


class Stopped(Exception):
    """A run was asked to stop, and has saved its work."""


class StopSignals:
    """While entered, the first signal sets `received`; a second one acts as ever, at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.__exit__()
        self.received = signal.Signals(number)
