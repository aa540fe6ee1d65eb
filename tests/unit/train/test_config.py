import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dualflow.config import ConfigError, from_dict, override, to_dict, to_toml
from dualflow.spec import PRESETS, ReadoutConfig
from dualflow.train.config import (
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    read_run_config,
    with_vocabulary,
)

TinyRun = Callable[..., RunConfig]

MINIMAL = """
[model]
preset = "demo"
variant = "dual"
[model.readout]
primary_loss_weight = 0.3
[train]
steps = 7
"""


def test_toml_with_a_preset_and_changes_to_it(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(MINIMAL)
    config = read_run_config(path)
    assert config.name == "small"
    assert config.train.steps == 7
    readout = ReadoutConfig(primary_loss_weight=0.3)
    assert config.model == dataclasses.replace(PRESETS["demo"], variant="dual", readout=readout)


def test_json_and_toml_of_a_run_read_back_equal(tmp_path: Path, tiny_run: TinyRun) -> None:
    config = tiny_run()
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert read_run_config(tmp_path / "config.json") == config
    assert read_run_config(tmp_path / "config.toml") == config


def test_toml_is_laid_over_a_base(tmp_path: Path, tiny_run: TinyRun) -> None:
    path = tmp_path / "more.toml"
    path.write_text("[train]\nsteps = 99\n")
    config = read_run_config(path, base=tiny_run("base"))
    assert (config.name, config.train.steps, config.train.batch_size) == ("base", 99, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[model]\npreset = "demmo"\n[train]\nsteps = 1', "model.preset: unknown preset 'demmo'"),
        ("[model]\npreset = [1]\n[train]\nsteps = 1", "model.preset: unknown preset"),
        ('[model]\npreset = "demo"\n[train]\nstps = 1', "train.stps: unknown key; did you mean"),
        ('[model]\npreset = "demo"\n[train]\nsteps = 0', "train: steps is 0; expected at least 1"),
        ('[model]\npreset = "demo"\n[train]\nsteps = 1.5', "train.steps: expected an integer"),
        ('[model]\npreset = "demo"', "train: missing"),
        ("[train]\nsteps = 1", "model: missing"),
        ("not toml", "is not valid TOML"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        read_run_config(path)


def test_a_missing_or_broken_json_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_run_config(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected an object"):
        read_run_config(tmp_path / "list.json")
    for text in ("{", '{"a":' + "[" * 100_000):
        (tmp_path / "cut.json").write_text(text)
        with pytest.raises(ConfigError, match="not valid JSON"):
            read_run_config(tmp_path / "cut.json")


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", ".hidden", "a b", "a\\b"])
def test_a_name_cannot_leave_the_runs_folder(name: str, tiny_run: TinyRun) -> None:
    with pytest.raises(ConfigError, match="name is"):
        from_dict(RunConfig, to_dict(tiny_run()) | {"name": name})


def test_windows_longer_than_the_positions_are_refused(tiny_run: TinyRun) -> None:
    with pytest.raises(ConfigError, match="sequence_length is 500, but .* 128"):
        tiny_run(data={"sequence_length": 500})


@pytest.mark.parametrize(
    "build",
    [
        lambda: OptimizerConfig(lr=0.0),
        lambda: OptimizerConfig(grad_clip=-1.0),
        lambda: OptimizerConfig(betas=(0.9,)),
        lambda: OptimizerConfig(betas=(0.9, 1.0)),
        lambda: OptimizerConfig(muon_momentum=1.0),
        lambda: OptimizerConfig(weight_decay=-0.1),
        lambda: ScheduleConfig(decay_fraction=1.5),
        lambda: ScheduleConfig(warmup_steps=-1),
        lambda: TrainConfig(steps=1, device="tpu"),
        lambda: TrainConfig(steps=1, keep_last=0),
        lambda: TrainConfig(steps=1, threads=0),
        lambda: TrainConfig(steps=1, threads=10**8),
        lambda: OptimizerConfig(muon_steps=100),
    ],
)
def test_impossible_values_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        build()


def test_the_fingerprint_covers_what_decides_the_losses_and_nothing_else(tiny_run: TinyRun) -> None:
    base = tiny_run()
    for same in ("name=other", "train.threads=2", "train.eval_every=3", "data.cache_dir=x"):
        assert override(base, [same]).fingerprint() == base.fingerprint()
    for other in ("seed=1", "optimizer.lr=1e-4", "train.steps=13", "train.precision=bf16"):
        assert override(base, [other]).fingerprint() != base.fingerprint()


def test_the_model_is_fitted_to_the_vocabulary(tiny_run: TinyRun) -> None:
    config = tiny_run()
    assert with_vocabulary(config, 259) is config
    assert with_vocabulary(config, 250).model.real_vocab_size == 250
    with pytest.raises(ConfigError, match="300 ids, but the model has room for 259"):
        with_vocabulary(config, 300)
