import os
import signal
import subprocess
import sys
import threading

import pytest

from dualflow.train.interrupt import StopSignals, TrainingInterrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_old_handler_comes_back(number: int) -> None:
    notes: list[str] = []
    before = signal.getsignal(number)
    with StopSignals(notes.append) as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number
    assert len(notes) == 1
    assert signal.getsignal(number) == before


SECOND = """
import os, signal
from dualflow.train.interrupt import StopSignals
with StopSignals(print, echoes={echoes}):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.{second})
    print("still here")
"""


@pytest.mark.parametrize(("second", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_the_second_signal_ends_the_process_at_once(second: str, code: int) -> None:
    program = SECOND.format(echoes=False, second=second)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == code
    assert "still here" not in done.stdout


def test_an_echo_of_the_first_signal_is_ignored_under_torchrun() -> None:
    program = SECOND.format(echoes=True, second="SIGINT")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0
    assert "still here" in done.stdout


def test_outside_the_main_thread_nothing_is_installed() -> None:
    results: list[object] = []

    def work() -> None:
        with StopSignals(lambda _: None) as signals:
            results.append(signals.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [None]


def test_the_exit_code_says_which_signal_it_was() -> None:
    assert TrainingInterrupted("stopped", signal.SIGINT).exit_code == 130
    assert TrainingInterrupted("stopped", signal.SIGTERM).exit_code == 143
    assert isinstance(TrainingInterrupted("stopped", None), KeyboardInterrupt)
