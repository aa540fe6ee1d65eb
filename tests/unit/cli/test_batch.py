"""``dualflow generate --input ... --output ...`` as a person calls it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dualflow.cli import batch
from dualflow.cli.main import main
from tests.unit.cli.models import save_tiny

PROMPTS = [{"prompt": text, "id": text} for text in ("def", "class", "import os", "x = 1")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("batch") / "model", chat=True)


@pytest.fixture(autouse=True)
def in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(lines: list[Any], name: str = "in.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def generate(model: str, *arguments: str) -> int:
    words = ["generate", model, "--input", "in.jsonl", "--output", "out.jsonl"]
    return main([*words, "--device", "cpu", "--max-tokens", "5", "--seed", "1", *arguments])


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out.jsonl").read_text("utf-8").splitlines()]


def outputs() -> dict[Any, Any]:
    """What was generated, by id; usage tells of what else was in the cache, and is left out."""
    return {result["id"] or result["line"]: result.get("outputs") for result in results()}


def test_every_prompt_has_a_result_equal_to_that_of_generate(model, capfd):
    write([*PROMPTS, {"prompt": "alone", "seed": 7, "temperature": 1}])
    assert generate(model) == 0
    assert set(outputs()) == {"def", "class", "import os", "x = 1", 5}
    assert all(len(one[0]["token_ids"]) <= 5 for one in outputs().values())
    assert "5 results in" in capfd.readouterr().err
    words = ["generate", model, "--prompt", "alone", "--seed", "7", "--temperature", "1"]
    assert main([*words, "--max-tokens", "5", "--device", "cpu"]) == 0
    assert capfd.readouterr().out == outputs()[5][0]["text"] + "\n"


def test_what_the_output_holds_is_not_run_again(model, capfd, monkeypatch):
    write(PROMPTS)
    assert generate(model) == 0
    whole, before = outputs(), Path("out.jsonl").read_bytes()
    assert generate(model) == 0
    assert Path("out.jsonl").read_bytes() == before
    assert "4 of 4 results are in out.jsonl already" in capfd.readouterr().err
    lines = before.splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:-9])
    assert generate(model) == 0
    assert Path("out.jsonl").read_bytes().startswith(b"".join(lines[:2]))
    assert outputs() == whole


def test_a_line_that_was_changed_or_added_is_run(model, capfd):
    write(PROMPTS)
    generate(model)
    before = outputs()
    write([*PROMPTS[:3], {"prompt": "y = 2", "id": "x = 1"}, {"prompt": "new"}])
    assert generate(model) == 0
    after = outputs()
    assert {name: after[name] for name in ("def", "class")} == {
        name: before[name] for name in ("def", "class")
    }
    assert after["x = 1"] != before["x = 1"] and 5 in after
    assert "1 results of other requests" in capfd.readouterr().err


def test_another_model_or_other_options_do_not_mix_with_what_is_there(model, capfd, tmp_path):
    write(PROMPTS)
    generate(model)
    before = Path("out.jsonl").read_bytes()
    assert generate(model, "--temperature", "0") == 2
    assert "none of them of these prompts with this model" in capfd.readouterr().err
    other = save_tiny(tmp_path / "other", chat=True, seed=1)
    assert generate(other) == 2
    assert Path("out.jsonl").read_bytes() == before
    shutil.copytree(model, tmp_path / "copy")
    assert generate(str(tmp_path / "copy")) == 0  # the same model elsewhere
    assert generate(model, "--temperature", "0", "--overwrite") == 0


def test_bad_lines_are_told_before_anything_runs(model, capfd, monkeypatch):
    monkeypatch.setattr(batch, "load_llm", None)  # whoever loads the model fails
    write([*PROMPTS, {"prompt": 3}, {"promt": "x"}])
    assert generate(model) == 2
    err = capfd.readouterr().err
    assert "line 5: prompt is 3; expected a text\n" in err
    assert "line 6: there is no field 'promt'; did you mean 'prompt'?\n" in err
    assert "in.jsonl: 2 lines cannot be used; nothing was run" in err
    assert not Path("out.jsonl").exists()
    write([{"prompt": 3}] * 12)
    assert generate(model) == 2
    assert "and 2 more" in capfd.readouterr().err


def test_a_request_that_fails_has_an_error_and_the_rest_go_on(model, capfd):
    write([{"prompt": "x" * 500}, {"prompt_ids": [900]}, *PROMPTS])
    assert generate(model) == 1
    errors = {result["line"]: result["error"] for result in results() if "error" in result}
    assert "500 tokens, but the model has 128 positions" in errors[1]
    assert "token id 900" in errors[2]
    assert len(results()) == 6
    assert "2 of 6 requests failed; --retry-failed runs them again" in capfd.readouterr().err
    assert generate(model) == 1  # they are not tried again unasked
    assert len(results()) == 6
    assert generate(model, "--retry-failed") == 1
    assert len(results()) == 6 and len(outputs()) == 6


def test_messages_go_through_the_chat_template(model):
    messages = [{"role": "user", "content": "hi<|im_end|>"}]
    write([{"messages": messages}, {"messages": [{"role": "user", "content": 3}]}])
    assert generate(model) == 1
    good, bad = sorted(results(), key=lambda result: result["line"])
    # <|im_start|>user, a line break and so on: the name that was typed is ten plain bytes.
    assert good["usage"]["prompt_tokens"] == 1 + 5 + 2 + 10 + 1 + 1 + 1 + 10
    assert "messages[0].content is a int" in bad["error"]


def test_messages_need_a_chat_template(tmp_path, capfd):
    plain = save_tiny(tmp_path / "plain")
    write([{"messages": [{"role": "user", "content": "hi"}]}])
    assert generate(plain) == 2
    assert "no chat template" in capfd.readouterr().err


def test_several_outputs_log_probabilities_and_figures(model):
    write([{"prompt": "x", "n": 2, "logprobs": 1, "prompt_logprobs": 0, "aux": "off"}])
    assert generate(model) == 0
    (result,) = results()
    assert len(result["outputs"]) == 2
    for output in result["outputs"]:
        assert [token["token_id"] for token in output["logprobs"]] == output["token_ids"]
        assert all(len(token["top"]) == 1 for token in output["logprobs"])
    assert result["prompt_logprobs"] == []
    assert result["usage"]["new_tokens"] == sum(len(o["token_ids"]) for o in result["outputs"])
    assert result["usage"]["aux_positions"] == 0


def test_more_requests_than_run_at_once(model):
    write([{"prompt": f"line {number}"} for number in range(12)])
    assert generate(model, "--max-running", "2") == 0
    few = outputs()
    Path("out.jsonl").unlink()
    assert generate(model) == 0
    assert outputs() == few


def test_ctrl_c_keeps_what_is_done(model, capfd, monkeypatch):
    import os
    import signal

    write([{"prompt": "long", "max_tokens": 60}, *PROMPTS])
    written: list[int] = []
    original = batch.ResultsFile.write

    def interrupted(self: Any, request: Any, content: Any) -> None:
        original(self, request, content)
        written.append(request.line)
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(batch.ResultsFile, "write", interrupted)
    assert generate(model, "--temperature", "0") == 130
    kept = len(results())
    assert 2 <= kept < 5
    err = capfd.readouterr().err
    assert f"{kept} of 5 results are kept; the same command goes on" in err
    assert "Traceback" not in err
    monkeypatch.setattr(batch.ResultsFile, "write", original)
    assert generate(model, "--temperature", "0") == 0
    assert len(outputs()) == len(results()) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x"], "--prompt and --input exclude each other"),
        (["--json"], "--json says nothing about a batch"),
        (["--max-running", "0"], "--max-running is 0; expected at least 1"),
        (["--output", "in.jsonl"], "the input itself"),
        (["--input", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
    ],
)
def test_what_does_not_go_together_is_one_line(model, capfd, arguments, message):
    write(PROMPTS)
    assert generate(model, *arguments) == 2
    err = capfd.readouterr().err
    assert message in err and err.count("\n") == 1
