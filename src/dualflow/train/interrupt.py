"""Ctrl-C and SIGTERM: the first asks the loop to finish its step and save, the second ends the
process at once.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_ECHO_SECONDS = 2.0
"""torchrun passes a signal on that a terminal has already sent to every process: a repeat this soon
is an echo.
"""


class TrainingInterrupted(KeyboardInterrupt):
    """A signal stopped the run after it was saved. ``exit_code`` is 130 for Ctrl-C and 143 for
    SIGTERM.
    """

    def __init__(self, message: str, signal_number: int | None) -> None:
        super().__init__(message)
        # Another rank may have been the one to get it: Ctrl-C reaches them all, SIGTERM not always.
        self.exit_code = 128 + (signal_number or signal.SIGTERM)


class StopSignals:
    """While entered, catches SIGINT and SIGTERM; outside the main thread, where Python forbids
    that, it does nothing.

    received: the number of the first signal, or None so far.
    notify:   called once, inside the handler, with what is going to happen; it must not use
              buffers.
    echoes:   whether repeats within two seconds are ignored (see ``_ECHO_SECONDS``).
    """

    def __init__(self, notify: Callable[[str], None], echoes: bool = False) -> None:
        self.received: int | None = None
        self._notify = notify
        self._echoes = echoes
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None:
            if self._echoes and now - self._first < _ECHO_SECONDS:
                return
            # Not an exception: nothing on the way up may catch it, wait, or write half a file.
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h\n")  # the live display hides the cursor
            os._exit(128 + number)
        self.received, self._first = number, now
        self._notify("stopping: this step is finished and saved first; again to stop at once")
