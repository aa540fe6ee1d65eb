"""Ctrl-C that asks before it breaks: work in steps ends at the end of one, not in its middle."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """While entered, the first Ctrl-C only sets ``asked``; the second one raises
    ``KeyboardInterrupt``. Outside the main thread, where Python forbids it, nothing is caught.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            signal.default_int_handler(number, frame)
        stop.asked = True

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
