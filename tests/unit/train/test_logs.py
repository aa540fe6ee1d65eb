import builtins
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dualflow.extras import MissingExtraError
from dualflow.train.config import RunConfig
from dualflow.train.display import Plain, Remaining, open_display
from dualflow.train.logs import JsonLines, open_sinks
from dualflow.train.run_folder import RunFolder

TinyRun = Callable[..., RunConfig]

TRAIN = {
    "kind": "train", "step": 5, "tokens": 320, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.5,
    "tokens_per_second": 1234.0,
}  # fmt: skip
VALIDATION = {
    "kind": "validation", "step": 5, "tokens": 320, "loss": 2.25, "loss_p": 2.5, "loss_q": None,
}  # fmt: skip


def test_json_lines_are_appended_and_flushed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for record in (TRAIN, VALIDATION):
        sink = JsonLines(path)
        sink.write(record)
        assert json.loads(path.read_text().splitlines()[-1]) == record
        sink.close()
    assert len(path.read_text().splitlines()) == 2


def test_tensorboard_gets_the_numbers_and_drops_what_is_written_again(
    tmp_path: Path, tiny_run: TinyRun
) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = tiny_run(train={"tensorboard": "on"})
    for done in (0, 4):
        sinks = open_sinks(config, RunFolder(tmp_path), done)
        for step in range(done + 1, 9):
            for sink in sinks:
                sink.write(TRAIN | {"step": step, "loss": done + step / 10})
        for sink in sinks:
            sink.close()
    events = loading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))
    assert losses[4] == pytest.approx(0.4)
    assert losses[5] == pytest.approx(4.5)


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    real = builtins.__import__

    def refuse(name: str, *args, **settings):
        if name.split(".")[0] in packages or name in packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **settings)

    monkeypatch.setattr("importlib.import_module", lambda name, package=None: refuse(name))


def test_without_tensorboard_auto_goes_on_and_on_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_run: TinyRun
) -> None:
    without(monkeypatch, "torch.utils.tensorboard")
    sinks = open_sinks(tiny_run(train={"tensorboard": "auto"}), RunFolder(tmp_path), 0)
    assert len(sinks) == 1
    with pytest.raises(MissingExtraError, match=r"pip install 'dualflow\[train\]'"):
        open_sinks(tiny_run(train={"tensorboard": "on"}), RunFolder(tmp_path), 0)


def test_weights_and_biases_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_run: TinyRun
) -> None:
    without(monkeypatch, "wandb")
    with pytest.raises(MissingExtraError, match=r"pip install 'dualflow\[wandb\]'"):
        open_sinks(tiny_run(train={"wandb_project": "dual"}), RunFolder(tmp_path), 0)


def test_plain_lines_show_every_validation_and_throttle_training(capsys) -> None:
    display = Plain("run")
    display.begin(0, 100)
    display.note("two\nlines")
    for step in range(1, 20):
        display.update(TRAIN | {"step": step})
    display.update(VALIDATION)
    display.update(TRAIN | {"step": 100})
    shown = capsys.readouterr().err.splitlines()
    assert shown[:2] == ["run: two", "run: lines"]
    assert shown[2].startswith("run: step 1/100: loss 2.5000, lr 1.00e-03, 1,234 tokens/s")
    assert shown[3] == "run: step 5/100: validation loss 2.2500, p 2.5000"
    assert shown[4] == "run: step 100/100: loss 2.5000, lr 1.00e-03, 1,234 tokens/s"
    assert len(shown) == 5


def test_a_live_display_shows_loss_rate_validation_and_time_left(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    display = open_display("live", "run")
    display.note("before [the] run")
    display.begin(0, 10)
    display.update(TRAIN)
    display.update(VALIDATION)
    display.close()
    shown = capsys.readouterr().err
    assert "before [the] run" in shown
    for part in ("5/10", "loss 2.5000", "1,234 tokens/s", "validation loss 2.2500", "left"):
        assert part in shown


def test_no_display_is_silent(capsys) -> None:
    display = open_display("none", "run")
    display.begin(0, 10)
    display.note("note")
    display.update(TRAIN)
    display.close()
    assert capsys.readouterr() == ("", "")


def test_the_time_left_counts_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    remaining = Remaining(50, 100)
    assert remaining.text(50) == ""
    now[0] += 20
    assert remaining.text(60) == "0:01:20 left"
    assert remaining.text(100) == ""
