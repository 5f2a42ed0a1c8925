"""SIGTERM and Ctrl-C as a request to stop, which all processes follow at the same step."""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec


class Ended(Exception):
    """A script has done what it was asked for, and says so."""


class Stopped(Exception):
    """A run was asked to stop, and has saved its work."""

    def __init__(self, step: int, folder: Path | None):
        super().__init__(f"stopped at step {step}")
        self.folder = folder


class StopSignals:
    """While entered, the first signal is a request; a later one acts as ever, at once.

    Not within a second: some shells and `make` pass one key press on twice.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)
    ECHO_SECONDS = 1.0

    def __init__(self, after: str = "step") -> None:
        self.received: signal.Signals | None = None
        self._after, self._when = after, 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._asked = _Anywhere() if jax.process_count() > 1 else None

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

    def asked(self) -> bool:
        """Whether a process has received a signal: the same answer on all that ask equally often.

        With several processes, the answer is that to the question before.
        """
        here = self.received is not None
        return here if self._asked is None else self._asked(here)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._when = signal.Signals(number), now
            # (`print` may be what was interrupted.)
            text = f"stopping after this {self._after}; once more stops at once\n"
            os.write(2, text.encode())
        elif now > self._when + self.ECHO_SECONDS:
            before = self._before[signal.Signals(number)]
            self.__exit__()
            if callable(before):
                before(number, frame)
            else:
                signal.raise_signal(signal.Signals(number))


class _Anywhere:
    """Whether a flag is true on any process.

    What a call asks, the next one answers: meanwhile the devices have begun another step, so that
    they never wait for the processes to agree.
    """

    def __init__(self) -> None:
        count = jax.device_count()
        mesh = jax.make_mesh((count,), ("all",), axis_types=(AxisType.Auto,))
        self._split = NamedSharding(mesh, PartitionSpec("all"))
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: jax.Array | None = None

    def __call__(self, flag: bool) -> bool:
        here = np.full(len(jax.local_devices()), flag)
        flags = jax.make_array_from_process_local_data(self._split, here)
        before, self._pending = self._pending, self._any(flags)
        return before is not None and bool(before)
