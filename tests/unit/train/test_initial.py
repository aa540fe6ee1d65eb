"""What a run takes from the model it begins from, and what does not fit it."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils

from dualflow.checkpoint import load_model, save_model
from dualflow.checkpoint.retrofit import add_aux
from dualflow.checkpoint.store import read_config
from dualflow.config import ConfigError, to_toml
from dualflow.model import build_model, quantise_model
from dualflow.recipes import demo
from dualflow.spec import ReadoutConfig
from dualflow.testing.configs import tiny_config
from dualflow.train import RunConfig, train
from dualflow.train.config import INITIAL_MODEL, read_run_config, with_assignments
from dualflow.train.initial import Origin, initial_config, load_initial, read_origin, store_as
from tests.unit.train.initial_models import standard_model, write_initial

TinyRun = Callable[..., RunConfig]


def test_only_the_readout_may_differ_from_the_model(source: Path) -> None:
    changed = {"readout": {"kind": "aux_only", "primary_loss_weight": 0.5}}
    config = initial_config(str(source), changed)
    assert config.readout == ReadoutConfig(kind="aux_only", primary_loss_weight=0.5)
    model = load_initial(str(source), config, torch.device("cpu"))
    assert model.config == config
    stored = load_model(source, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())


def test_the_primary_of_a_frozen_model_stays_one_whatever_is_read(source: Path) -> None:
    changed = {"readout": {"kind": "aux_only"}}
    assert initial_config(str(source), changed, frozen=True).has_primary_readout
    assert not initial_config(str(source), changed).has_primary_readout


def test_a_retrofit_read_from_q_alone_can_be_trained_as_a_mixture(tmp_path: Path) -> None:
    retrofit = add_aux(standard_model(), readout=ReadoutConfig(kind="aux_only"))
    source = write_initial(tmp_path / "retrofit", retrofit)
    for frozen in (False, True):
        mixed = initial_config(str(source), {"readout": {"kind": "mixture"}}, frozen)
        assert mixed.readout == ReadoutConfig()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "model.hidden_size is 64, but that of initial_model is 32; only"),
        ({"rope_theta": 5.0}, "model.rope_theta is 5.0, but"),
        ({"aux": {"lora_rank": 4}}, "model.aux is .*'lora_rank': 4"),
        ({"readout": {"kind": "learned"}}, "'learned' has weights of its own.*dualflow retrofit"),
        ({"hiden_size": 64}, "model.hiden_size: unknown key; did you mean 'hidden_size'"),
        ({"readout": {"kind": "aux"}}, "model.readout.kind: expected one of"),
    ],
)
def test_a_change_that_makes_another_model_is_refused(
    source: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        initial_config(str(source), changes)


RUN = """
initial_model = "source"
[data]
source = "text.txt"
sequence_length = 16
[train]
steps = 3
trainable = "aux"
"""


@pytest.fixture
def run_file(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_a_file_names_the_model_and_needs_no_other_table_for_it(
    run_file: Path, source: Path
) -> None:
    config = read_run_config(run_file)
    assert config.model == read_config(source)
    assert config.data.tokenizer == INITIAL_MODEL
    assert config.initial_digest is not None
    run_file.write_text(to_toml(config))
    assert read_run_config(run_file) == config
    shutil.rmtree(source)
    assert read_run_config(run_file) == config


def test_assignments_and_recipes_compose_with_the_model(
    tmp_path: Path, run_file: Path, source: Path
) -> None:
    readout = "model.readout.kind=aux_only"
    config = read_run_config(run_file, assignments=[readout, "data.tokenizer=bytes"])
    assert config.model.readout.kind == "aux_only"
    assert config.data.tokenizer == "bytes"
    plain = write_initial(tmp_path / "plain", standard_model())
    other = ["initial_model=plain", "train.trainable=all"]
    assert read_run_config(run_file, assignments=other).model == read_config(plain)

    short = ("seed=3", "data.sequence_length=16")
    begun = with_assignments(demo("dual"), ["initial_model=source", readout, *short])
    assert begun.model == dataclasses.replace(
        read_config(source), readout=ReadoutConfig(kind="aux_only")
    )
    assert (begun.seed, begun.data.tokenizer) == (3, INITIAL_MODEL)
    moved = shutil.copytree(source, tmp_path / "moved")
    again = with_assignments(begun, [f"initial_model={moved}", readout])
    assert again.fingerprint() == begun.fingerprint()
    assert with_assignments(begun, ["initial_model=plain"]).fingerprint() != begun.fingerprint()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("initial_model=nowhere", "initial_model: there is no folder nowhere"),
        ("initial_model=none", "model: missing"),
        ("model.preset=demo", "model.preset and initial_model exclude each other"),
        ("data.sequence_length=500", "sequence_length is 500, but .* 128"),
        ("model.readout.kind=primary_only", "'primary_only' reads nothing from the auxiliary"),
        ("model.vocab_size=300", "model.vocab_size is 300, but that of initial_model is 264"),
    ],
)
def test_a_run_that_does_not_fit_its_model_is_refused(
    run_file: Path, assignment: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_run_config(run_file, assignments=[assignment])


def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, run_file: Path) -> None:
    write_initial(tmp_path / "plain", standard_model())
    with pytest.raises(ValueError, match="no tensors of an auxiliary.*dualflow retrofit"):
        read_run_config(run_file, assignments=["initial_model=plain"])
    save_model(quantise_model(standard_model(), "int8"), tmp_path / "int8")
    with pytest.raises(ValueError, match="holds int8 weights, which cannot be trained"):
        read_run_config(run_file, assignments=["initial_model=int8"])
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type 'llama'.*dualflow convert"):
        read_run_config(run_file, assignments=["initial_model=foreign"])
    save_model(standard_model().double(), tmp_path / "wide")
    with pytest.raises(ValueError, match="holds float64 weights.*--dtype float32"):
        read_origin(str(tmp_path / "wide"))


def test_another_tokenizer_is_refused_with_both_sizes(tmp_path: Path, begin: TinyRun) -> None:
    config = begin()
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="bpe:261"))
    with pytest.raises(ValueError, match=r"\(261 ids\) is not that of initial_model \(259 ids\)"):
        train(other, tmp_path, progress="none")
    same = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="bytes"))
    assert train(same, tmp_path, progress="none")["steps"] == 6
    assert read_config(tmp_path / "tiny").real_vocab_size == 261


def test_what_float16_cannot_hold_is_stored_in_float32() -> None:
    model = build_model(tiny_config("standard"))
    assert store_as(model, Origin(main_format="F16")) is None
    assert model.get_parameter("model.norm.weight").dtype == torch.float16
    model = build_model(tiny_config("standard"))
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] = 1e6
    note = store_as(model, Origin(main_format="F16"))
    assert note is not None
    assert "model.norm.weight has values too large for torch.float16" in note
    assert {p.dtype for p in model.parameters()} == {torch.float32}
