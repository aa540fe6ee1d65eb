"""The first Ctrl-C asks, the second one breaks, and afterwards all is as before."""

import os
import signal
import threading

import pytest

from dualflow.cli.interrupts import stop_request


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_asks_and_the_second_breaks():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_request() as stop:
        assert not stop.asked
        press()
        assert stop.asked
        press()
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_are_left_alone():
    found: list[bool] = []

    def work() -> None:
        with stop_request() as stop:
            found.append(stop.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]
