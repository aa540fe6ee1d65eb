"""Ctrl-C between model steps instead of amid one. No torch."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class InterruptLater:
    """While entered, Ctrl-C waits for the end of the block, and is raised there; a second one is
    raised at once. Outside the main thread, and where the program handles it itself, nothing
    changes.
    """

    def __init__(self) -> None:
        self._received = False
        self._active = False

    def __enter__(self) -> Self:
        self._received = False
        ours = threading.current_thread() is threading.main_thread()
        if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._active = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._active:
            self._active = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._received and kind is None:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            signal.default_int_handler(number, frame)
        self._received = True
