"""``dualflow eval --tasks``: tiny tasks from local files, against values worked out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from dualflow.checkpoint import save_model
from dualflow.cli.main import main
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.spec import ModelConfig
from dualflow.testing.steps import whole_sequence
from dualflow.testing.tensors import tiny_model

CONFIG = ModelConfig(
    variant="dual", vocab_size=259, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16,
    max_position=64,
)  # fmt: skip
EOS = bytes_tokenizer().eos_id

CHOICES = [
    {"question": "What is", "choices": ["a", "bee", "sea"], "answer": 1},
    {"question": "Say", "choices": ["x", "yy"], "answer": 0},
    {"question": "Why", "choices": ["so", "not"], "answer": 1},
]
TEXTS = [{"text": "Some text with words."}, {"text": "and more"}]
QUESTIONS = [{"question": "Go", "answer": None}, {"question": "to", "answer": "nothing"}]


@pytest.fixture
def model(tmp_path: Path) -> str:
    tokenizer = bytes_tokenizer().to_json()
    save_model(tiny_model(CONFIG, dtype=torch.float32), tmp_path / "m", tokenizer_json=tokenizer)
    return str(tmp_path / "m")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    folder = tmp_path / "tasks"
    folder.mkdir()
    write(folder, "choice", CHOICES, [
        "output_type: multiple_choice", 'doc_to_text: "{{question}}"',
        'doc_to_choice: "{{choices}}"', 'doc_to_target: "{{answer}}"',
        "metric_list: [{metric: acc}, {metric: acc_norm}]",
    ])  # fmt: skip
    write(folder, "rolling", TEXTS, [
        "output_type: loglikelihood_rolling", 'doc_to_text: ""', 'doc_to_target: "{{text}}"',
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]",
    ])  # fmt: skip
    answers = [{**row, "answer": row["answer"] or greedy(row["question"], 6)} for row in QUESTIONS]
    write(folder, "until", answers, [
        "output_type: generate_until", 'doc_to_text: "{{question}}"',
        'doc_to_target: "{{answer}}"', "generation_kwargs: {until: [], max_gen_toks: 6}",
        "metric_list: [{metric: exact_match}]",
    ])  # fmt: skip
    return str(folder)


def write(folder: Path, name: str, rows: list[dict[str, Any]], lines: list[str]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    head = [
        f"task: tiny_{name}", "dataset_path: json", "test_split: test", "dataset_kwargs:",
        f"  data_files: {{test: {json.dumps(str(data))}}}",
        f"  cache_dir: {json.dumps(str(folder.parent / 'cache'))}",
    ]  # fmt: skip
    (folder / f"{name}.yaml").write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")


def log_r(tokens: list[int], aux: str = "on") -> torch.Tensor:
    """[tokens, vocabulary] after each token, in float64."""
    model = tiny_model(CONFIG, dtype=torch.float32).double()
    with torch.no_grad():
        out = whole_sequence(model, torch.tensor(tokens))
        read = model.log_probs(out.primary_TD, out.aux_FAD)
    found = read.r if aux == "on" else read.p
    assert found is not None
    return found


def score(before: list[int], text: str, aux: str = "on") -> float:
    ids = list(text.encode())
    rows = log_r([*before, *ids], aux)[len(before) - 1 : -1]
    return float(rows[torch.arange(len(ids)), torch.tensor(ids)].sum())


def greedy(prompt: str, count: int) -> str:
    ids = list(prompt.encode())
    for _ in range(count):
        ids.append(int(log_r(ids)[-1].argmax()))
    assert EOS not in ids
    return bytes_tokenizer().decode(ids[-count:])


def results(capsys: pytest.CaptureFixture[str], *words: str) -> dict[tuple[str, str], dict]:
    assert main(["eval", *words, "--json", "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    return {(row["task"], row["metric"]): row for row in record["results"]}


@pytest.mark.parametrize("aux", ["on", "off"])
def test_choices_are_those_of_the_highest_score(model, tasks, capsys, aux):
    command = (model, "--tasks", "tiny_choice", "--include-path", tasks, "--aux", aux)
    found = results(capsys, *command)
    right = {"acc": 0, "acc_norm": 0}
    for row in CHOICES:
        before = list(row["question"].encode())
        scores = [score(before, f" {choice}", aux) for choice in row["choices"]]
        lengths = [len(choice) for choice in row["choices"]]
        each = [total / length for total, length in zip(scores, lengths, strict=True)]
        right["acc"] += scores.index(max(scores)) == row["answer"]
        right["acc_norm"] += each.index(max(each)) == row["answer"]
    for metric, count in right.items():
        row = found["tiny_choice", metric]
        assert row["value"] == pytest.approx(count / 3)
        assert (row["samples"], row["num_fewshot"], row["higher_is_better"]) == (3, 0, True)


@pytest.mark.parametrize("aux", ["on", "off"])
def test_perplexities_are_those_of_whole_texts(model, tasks, capsys, aux):
    command = (model, "--tasks", "tiny_rolling", "--include-path", tasks, "--aux", aux)
    found = results(capsys, *command)
    total = sum(score([EOS], row["text"], aux) for row in TEXTS)
    size = sum(len(row["text"].encode()) for row in TEXTS)
    words = sum(len(row["text"].split()) for row in TEXTS)
    bits, perplexity = (found["tiny_rolling", m] for m in ("bits_per_byte", "word_perplexity"))
    assert bits["value"] == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert perplexity["value"] == pytest.approx(math.exp(-total / words), rel=1e-4)
    assert bits["higher_is_better"] is False


def test_texts_are_compared_with_the_answer(model, tasks, capsys):
    found = results(capsys, model, "--tasks", "tiny_until", "--include-path", tasks)
    assert found["tiny_until", "exact_match"]["value"] == 0.5


def test_several_tasks_make_a_table_and_a_file(model, tasks, tmp_path, capsys):
    file = tmp_path / "out.json"
    options = ["--include-path", tasks, "--limit", "1", "--num-fewshot", "1", "--output", str(file)]
    assert main(["eval", model, "--tasks", "tiny_choice, tiny_until", *options]) == 0
    shown = capsys.readouterr().out
    assert "auxiliary on, the first 1 documents each" in shown
    for part in ("tiny_choice", "acc_norm", "exact_match", "higher"):
        assert part in shown
    record = json.loads(file.read_text())
    assert (record["aux"], record["limit"]) == ("on", 1)
    rows = {row["task"]: row for row in record["results"]}
    assert rows["tiny_choice"]["samples"] == 1
    assert rows["tiny_choice"]["num_fewshot"] == 1
    assert main(["eval", model, "--tasks", "tiny_until", "--output", str(file)]) == 2
    assert "exists already; name a new file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--tasks", ","], "--tasks names none"),
        (["--tasks", "x", "--limit", "0"], "--limit is 0; expected 1 or more"),
        (["--tasks", "x", "--num-fewshot", "-1"], "--num-fewshot is -1; expected 0 or more"),
        (["--tasks", "x", "--data", "a.txt"], "--data belongs to the loss, not to --tasks"),
        (["--tasks", "x", "--include-path", "none"], "there is no folder none with tasks"),
        (["--tasks", "x", "--aux", "of"], "aux is 'of'; expected on, off, exact or threshold=T"),
        (["--aux", "off"], "--aux belongs to --tasks, which is missing"),
        (["--limit", "3"], "--limit belongs to --tasks, which is missing"),
    ],
)
def test_options_that_do_not_fit_are_one_line(model, capsys, monkeypatch, options, found):
    assert main(["eval", model, *options]) == 2
    message = capsys.readouterr().err
    assert found in message
    assert message.count("\n") == 1


def test_a_missing_lm_eval_is_named(model, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", model, "--tasks", "x"]) == 2
    assert "pip install 'dualflow[eval]'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_unknown_task_is_named(model, tasks, capsys):
    assert main(["eval", model, "--tasks", "no_such_task", "--include-path", tasks]) == 2
    assert "lm-eval knows no task no_such_task" in capsys.readouterr().err
