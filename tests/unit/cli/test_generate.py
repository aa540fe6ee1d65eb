"""The verb ``generate``: text on standard output, everything else on standard error."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dualflow.checkpoint import save_model
from dualflow.cli.main import main
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.model import build_model
from dualflow.spec import ModelConfig, ReadoutConfig

CONFIG = ModelConfig(
    variant="dual", vocab_size=259, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16,
    max_position=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("generate") / "model"
    metrics = {"val_loss": 2.0, "val_loss_p": 2.5, "val_loss_q": 2.2}
    save_model(
        build_model(CONFIG), folder, tokenizer_json=bytes_tokenizer().to_json(), metrics=metrics
    )
    return str(folder)


def generate(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["generate", *arguments, "--device", "cpu"])
    out, err = capfd.readouterr()
    return code, out, err


def test_text_goes_to_standard_output_and_figures_to_standard_error(capfd, model):
    code, out, err = generate(capfd, model, "--prompt", "def", "--max-tokens", "8", "--seed", "1")
    assert code == 0
    assert out.endswith("\n")
    assert "3 prompt + 8 new tokens (length)" in err
    assert "auxiliary at 8 of 10 positions" in err
    assert generate(capfd, model, "--prompt", "def", "--max-tokens", "8", "--seed", "1")[1] == out
    echoed = generate(
        capfd, model, "--prompt", "def", "--max-tokens", "8", "--seed", "1", "--echo"
    )[1]
    assert echoed == "def" + out


def test_json_holds_text_tokens_and_figures(capfd, model):
    plain = generate(capfd, model, "--prompt", "x", "--max-tokens", "6", "--seed", "3")[1]
    code, out, err = generate(
        capfd, model, "--prompt", "x", "--max-tokens", "6", "--seed", "3", "--json"
    )
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert result["text"] + "\n" == plain
    assert result["finish_reason"] == "length"
    assert len(result["tokens"]) == result["figures"]["new_tokens"] == 6
    shown = {"token_id", "text", "log_r", "log_p", "log_q", "alpha", "source"}
    assert set(result["tokens"][0]) == shown
    assert result["figures"]["decode_tokens_per_second"] > 0


def test_every_option_of_a_request_reaches_the_engine(capfd, model):
    options = "--top-k 9 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --presence-penalty 0.1"
    options += " --frequency-penalty 0.1 --logit-bias 65=4 --logit-bias 66=-1 --min-tokens 2"
    options += " --stop Q --stop-id 90 --ignore-eos --drafts ngram --num-drafts 2 --seed 1"
    code, _, err = generate(
        capfd, model, "--prompt", "abcabc", "--max-tokens", "9", *options.split()
    )
    assert code == 0
    assert "new tokens" in err
    code, out, _ = generate(
        capfd, model, "--prompt", "x", "--max-tokens", "4", "--allow-id", "65", "--allow-id", "66"
    )
    assert (code, set(out)) == (0, {*out} & {*"AB\n"})


def test_a_bias_decides_and_penalties_count(capfd, model):
    arguments = ("--prompt", "x", "--max-tokens", "3", "--temperature", "0", "--logit-bias", "65=9")
    assert generate(capfd, model, *arguments)[1] == "AAA\n"
    once = generate(capfd, model, *arguments, "--frequency-penalty", "2")[1]
    assert once.startswith("A")


def test_log_probabilities_are_reported_where_asked_for(capfd, model):
    arguments = ("--prompt", "xy", "--max-tokens", "2", "--temperature", "0", "--json")
    out = generate(capfd, model, *arguments, "--logprobs", "3", "--prompt-logprobs", "1")[1]
    result = json.loads(out)
    for token in result["tokens"]:
        assert len(token["top"]) == 3
        best = max(token["top"], key=lambda one: one["log_r"])
        assert best["token_id"] == token["token_id"]
    assert [token["token_id"] for token in result["prompt_tokens"]] == [ord("y")]


@pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
def test_log_probabilities_that_nobody_would_see_are_refused(capfd, model, option):
    code, out, err = generate(capfd, model, "--prompt", "x", option, "1")
    assert (code, out) == (2, "")
    assert "add --json" in err


def test_a_gguf_file_is_no_model_yet_and_the_verb_that_makes_one_is_named(capfd):
    code, _, err = generate(capfd, "some.gguf", "--prompt", "x")
    assert code == 2
    assert "dualflow convert some.gguf FOLDER" in err


def test_missing_kernels_are_told_where_pytorch_serves_in_their_place(
    capfd, model, tmp_path, monkeypatch
):
    from dualflow.ops.native import library

    load = library.load
    arguments = (model, "--prompt", "x", "--max-tokens", "2", "--device", "cpu")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    load.cache_clear()
    try:
        code, _, err = generate(capfd, *arguments)
        assert code == 0
        assert "not compiled" in err and "dualflow doctor" in err and "| backend torch" in err
        # Nobody who asks for PyTorch wants to be told.
        assert "note:" not in generate(capfd, *arguments, "--backend", "torch")[2]
    finally:
        load.cache_clear()


def test_several_outputs_stand_below_each_other(capfd, model):
    arguments = ("--prompt", "x", "--max-tokens", "4", "--seed", "1", "--n", "2")
    code, out, err = generate(capfd, model, *arguments)
    assert code == 0
    assert "--- 1 of 2\n" in out and "--- 2 of 2\n" in out
    assert err.count("new tokens") == 2
    result = json.loads(generate(capfd, model, *arguments, "--json")[1])
    assert [output["index"] for output in result["outputs"]] == [0, 1]
    assert all(len(output["tokens"]) == 4 for output in result["outputs"])
    # Output i is that of seed + i.
    alone = json.loads(
        generate(capfd, model, "--prompt", "x", "--max-tokens", "4", "--seed", "2", "--json")[1]
    )
    assert alone["text"] == result["outputs"][1]["text"]


@pytest.mark.parametrize("aux", ["exact", "threshold=0.7"])
def test_the_policies_of_the_auxiliary(capfd, model, aux):
    arguments = ("--prompt", "x", "--max-tokens", "6", "--temperature", "0", "--aux", aux)
    code, _, err = generate(capfd, model, *arguments)
    assert (code, "auxiliary at" in err) == (0, True)


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16"])
def test_number_formats_of_weights_and_cache(capfd, model, name):
    arguments = ("--prompt", "x", "--max-tokens", "2", "--backend", "torch")
    code, _, err = generate(capfd, model, *arguments, "--weights", name, "--kv-dtype", name)
    assert code == 0
    size = {"float64": 8, "float32": 4, "bfloat16": 2}[name]
    assert f"KV cache {32 * 2 * 16 * size / 1024:,.1f} KiB" in err  # one page of one layer


def test_switching_the_auxiliary_off_tells_both_losses(capfd, model):
    code, _, err = generate(capfd, model, "--prompt", "x", "--max-tokens", "3", "--aux", "off")
    assert code == 0
    assert "warning" in err and "2.5000" in err and "2.0000" in err
    assert "auxiliary at 0 of 3 positions" in err


def test_an_empty_prompt_starts_after_the_end_of_text_token(capfd, model):
    result = json.loads(generate(capfd, model, "--prompt", "", "--max-tokens", "2", "--json")[1])
    assert result["prompt_ids"] == [bytes_tokenizer().eos_id]


def test_control_tokens_typed_into_a_prompt_stay_plain_text(capfd, model):
    eos = bytes_tokenizer().eos_token
    assert eos is not None
    result = json.loads(generate(capfd, model, "--prompt", eos, "--max-tokens", "1", "--json")[1])
    assert result["prompt_ids"] == list(eos.encode())


def test_the_prompt_may_come_from_a_file(capfd, model, tmp_path):
    (tmp_path / "prompt.txt").write_bytes("é\n".encode())
    arguments = ("--prompt-file", str(tmp_path / "prompt.txt"), "--max-tokens", "1", "--json")
    assert json.loads(generate(capfd, model, *arguments)[1])["prompt_ids"] == list("é\n".encode())


def piped(model: str, text: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [
        sys.executable,
        "-c",
        "import sys; from dualflow.cli.main import main; sys.exit(main())",
    ]
    command += ["generate", model, "--device", "cpu", "--json", "--max-tokens", "1", *arguments]
    return subprocess.run(command, input=text, capture_output=True, check=False, timeout=60)


def test_the_prompt_may_be_piped_in(model):
    done = piped(model, b"pip\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt_ids"] == list(b"pip\n")


def test_bytes_that_are_no_text_are_refused(capfd, model, tmp_path):
    (tmp_path / "binary").write_bytes(b"ab\xff")
    code, out, err = generate(capfd, model, "--prompt-file", str(tmp_path / "binary"))
    assert (code, out) == (2, "")
    assert "not UTF-8: byte 2 is 0xff" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0; expected"),
        (["--top-p", "0"], "top_p is 0.0; expected a number above 0"),
        (["--top-k", "-1"], "top_k is -1; expected"),
        (["--min-p", "2"], "min_p is 2.0; expected"),
        (["--seed", "-1"], "seed is -1; expected"),
        (["--max-tokens", "0"], "max_tokens is 0; expected"),
        (["--stop", ""], "stop is ('',); expected texts"),
        (["--n", "0"], "n is 0; expected"),
        (["--presence-penalty", "3"], "presence_penalty is 3.0; expected"),
        (["--logit-bias", "a=1"], "--logit-bias is 'a=1'; expected ID=B"),
        (["--logit-bias", "1=200"], "logit_bias of token 1 is 200.0; expected"),
        (["--aux", "sometimes"], "aux is 'sometimes'; expected on, off, exact or threshold=T"),
        (["--aux", "threshold=2"], "the aux threshold is 2.0"),
        (["--json-schema", "nowhere.json"], "cannot read --json-schema nowhere.json"),
        (["--threads", "0"], "--threads is 0; expected at least 1"),
        (["--stop-id", "700"], "stop_ids has the token id 700, but the vocabulary ends at 258"),
        (["--output", "out.jsonl"], "--output is given without --input"),
        (["--input", "nowhere.jsonl"], "--input is given without --output"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_values_that_cannot_be_used_are_one_line_and_exit_code_2(capfd, model, arguments, message):
    if "--prompt-file" not in arguments:
        arguments = ["--prompt", "x", *arguments]
    code, out, err = generate(capfd, model, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_prompt_that_is_too_long_names_both_numbers(capfd, model):
    code, _, err = generate(capfd, model, "--prompt", "x" * 65)
    assert code == 2
    assert "65 tokens, but the model has 64 positions" in err


@pytest.mark.parametrize("name", ["nowhere", "some-owner/some-model"])
def test_models_that_are_not_there_are_one_line(capfd, name):
    code, _, err = generate(capfd, name, "--prompt", "x")
    assert code == 2
    assert f"there is no folder {name}" in err


def test_a_folder_that_holds_no_model_is_told_as_such(capfd, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    code, _, err = generate(capfd, str(tmp_path), "--prompt", "x")
    assert code == 2
    assert "holds no config.json (it holds notes.txt); supported: folders of model_type" in err


def test_a_device_that_is_not_there_is_one_line(capfd, model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["generate", model, "--prompt", "x", "--device", "cuda"]) == 2
    assert "device is 'cuda', and there is none here; usable: cpu" in capfd.readouterr().err


def test_the_auxiliary_cannot_be_off_without_a_trained_p(capfd, tmp_path):
    import dataclasses

    config = dataclasses.replace(CONFIG, readout=ReadoutConfig(kind="aux_only"))
    save_model(build_model(config), tmp_path / "m", tokenizer_json=bytes_tokenizer().to_json())
    code, out, err = generate(capfd, str(tmp_path / "m"), "--prompt", "x", "--aux", "off")
    assert (code, out) == (2, "")
    assert "there is no trained p" in err and "aux = 'on'" in err


def test_tokenizer_and_model_must_belong_together(capfd, tmp_path):
    import dataclasses

    config = dataclasses.replace(CONFIG, real_vocab_size=200)
    save_model(build_model(config), tmp_path / "m", tokenizer_json=bytes_tokenizer().to_json())
    code, _, err = generate(capfd, str(tmp_path / "m"), "--prompt", "x")
    assert code == 2
    assert "the tokenizer has 259 ids, the model 200" in err


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_an_interruption_ends_the_line_and_exits_with_130(tmp_path):
    import dataclasses

    slow = dataclasses.replace(CONFIG, max_position=200_000)
    save_model(build_model(slow), tmp_path / "m", tokenizer_json=bytes_tokenizer().to_json())
    command = [
        sys.executable,
        "-c",
        "import sys; from dualflow.cli.main import main; sys.exit(main())",
    ]
    command += [
        "generate",
        str(tmp_path / "m"),
        "--prompt",
        "x",
        "--max-tokens",
        "199999",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stdout is not None
    process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert out.endswith(b"\n")
    assert b"Traceback" not in err


def test_without_a_model_the_one_in_the_package_is_used(capfd):
    shipped = Path(sys.modules["dualflow"].__file__ or "").parent / "assets" / "tiny"
    code, _, err = generate(capfd, "--prompt", "def f(", "--max-tokens", "5", "--temperature", "0")
    if not shipped.is_dir():
        assert code == 2
        assert "no built-in model; name the MODEL" in err
        return
    assert code == 0
    assert sum(path.stat().st_size for path in shipped.rglob("*")) <= 2_000_000
    assert "new tokens" in err
