"""``dualflow retrofit``."""

import shlex

import pytest
import torch

from dualflow.checkpoint import load_model, read_config, save_model
from dualflow.cli.main import main
from dualflow.plan.costs import decode_flops_per_token
from dualflow.spec import AuxConfig, parameter_counts, standard_twin
from dualflow.testing import tiny_config
from dualflow.testing.tensors import tiny_model


@pytest.fixture
def folder(tmp_path):
    save_model(tiny_model(tiny_config(), dtype=torch.float32), tmp_path / "model")
    return str(tmp_path / "model")


def test_one_flow_with_all_couplings_by_default(folder, tmp_path, capsys):
    target = tmp_path / "dual"
    assert main(["retrofit", folder, str(target)]) == 0
    config = read_config(target)
    assert config.aux == AuxConfig()
    assert config.readout.kind == "mixture"
    shown = capsys.readouterr().out
    assert shown.startswith(f"{target}: dual model, ")
    added = parameter_counts(config).aux
    assert f"the auxiliary adds {added:,} parameters" in shown
    context = min(1024, config.max_position)
    ratio = decode_flops_per_token(config, context)
    ratio /= decode_flops_per_token(standard_twin(config), context)
    assert f"{ratio:.2f} times the FLOPs of a generated token ({context:,} tokens" in shown
    assert "0 bytes to the KV cache" in shown
    assert "is not trained yet: until it is, the model predicts the same up to rounding" in shown
    assert "--aux off leaves it out" in shown


def test_the_flow_is_what_the_options_say(folder, tmp_path, capsys):
    options = ["--owns", "o_proj, lm_head", "--lora-rank", "2", "--flows", "3"]
    options += ["--norms", "separate", "--readout", "learned", "--dtype", "bfloat16"]
    assert main(["retrofit", folder, str(tmp_path / "dual"), *options]) == 0
    config = read_config(tmp_path / "dual")
    assert config.aux == AuxConfig(
        num_flows=3, owns=("o_proj", "lm_head"), lora_rank=2, flow_norms="separate"
    )
    assert config.readout.kind == "learned"
    assert load_model(tmp_path / "dual").dtype == torch.bfloat16


def test_a_lora_without_names_adapts_attention_and_mlp(folder, tmp_path):
    assert main(["retrofit", folder, str(tmp_path / "dual"), "--lora-rank", "2"]) == 0
    aux = read_config(tmp_path / "dual").aux
    assert aux is not None
    assert aux.owns == ("q_proj", "o_proj", "mlp")


def test_the_command_it_names_is_a_run_of_the_auxiliary_alone(folder, tmp_path, capsys):
    target = tmp_path / "a dual"
    assert main(["retrofit", folder, str(target)]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "dualflow train" in text]
    assert main([*shlex.split(line.strip())[1:], "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"begun from {target}" in shown
    assert "(the auxiliary alone)" in shown


def test_a_quantised_retrofit_is_not_told_to_be_trained(folder, tmp_path, capsys):
    assert main(["retrofit", folder, str(tmp_path / "dual"), "--dtype", "int8"]) == 0
    shown = capsys.readouterr().out
    assert "quantised matrices are not trained" in shown
    assert "dualflow train" not in shown


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--flows", "0"], "--flows is 0; expected 1 or more"),
        (["--lora-rank", "-1"], "--lora-rank is -1; expected 1 or more"),
        (["--lora-rank", "0", "--owns", "mlp"], "--lora-rank is 0; expected 1 or more"),
        (["--owns", "k_proj"], "'k_proj' does not name different ones of q_proj, o_proj, mlp"),
        (["--owns", "mlp,mlp"], "'mlp,mlp' does not name different ones"),
        (["--readout", "primary_only"], "invalid choice: 'primary_only'"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(folder, tmp_path, capsys, options, found):
    assert main(["retrofit", folder, str(tmp_path / "dual"), *options]) == 2
    error = capsys.readouterr().err
    assert found in error
    assert error.count("\n") == 1
    assert not (tmp_path / "dual").exists()


def test_a_dual_model_is_refused_with_advice(folder, tmp_path, capsys):
    assert main(["retrofit", folder, str(tmp_path / "dual")]) == 0
    assert main(["retrofit", str(tmp_path / "dual"), str(tmp_path / "again")]) == 2
    error = capsys.readouterr().err
    assert "is a dual model already; train it further" in error
    assert "dualflow export" in error
