"""SIGTERM and Ctrl-C as a request to stop after the step at hand."""

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any


class Stopped(Exception):
    """A run was asked to stop, and has saved its work."""


class StopSignals:
    """While entered, the first signal sets `received`; a later one acts as ever, at once.

    Not within a second: some shells and `make` pass one key press on twice.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)
    ECHO_SECONDS = 1.0

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._when = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            for number in self.SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._when = signal.Signals(number), now
            print("stopping after this step; once more stops at once", file=sys.stderr)
        elif now > self._when + self.ECHO_SECONDS:
            before = self._before[self.received]
            self.__exit__()
            if callable(before):
                before(number, frame)
            else:
                signal.raise_signal(signal.Signals(number))
