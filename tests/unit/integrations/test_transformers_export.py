"""Whole models exported for transformers: read where dualflow is not installed, and by dualflow."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dualflow.checkpoint import load_model
from dualflow.checkpoint.store import read_primary_config
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.model import build_model, quantise_model
from dualflow.testing.configs import family_config, tiny_config
from dualflow.testing.tensors import same, tiny_model

pytest.importorskip("transformers")

import transformers

from dualflow.integrations.transformers import DualFlowForCausalLM
from dualflow.integrations.transformers.export import CODE_FILES, export_transformers
from dualflow.testing.twins import twin_of

TIED = family_config("llama_mha_tied", "dual")
UNTIED = family_config("qwen2", "dual")


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


def assert_same_tensors(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not same(ours[name], theirs[name])] == []


LOAD_WITHOUT_US = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dualflow":
            raise ImportError("dualflow is not installed here")


sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, again = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
model.save_pretrained(again)
assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("ab")["input_ids"] == [97, 98]
print(ids[0].tolist())
"""


def load_without_us(folder: Path, again: Path, cache: Path) -> list[int]:
    run = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_US, str(folder), str(again)],
        env={"HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_an_exported_folder_brings_its_own_code(tmp_path: Path) -> None:
    native = tiny_model(TIED, dtype=torch.float32).eval()
    companions = {
        "generation_config.json": '{"eos_token_id": 51}',
        "chat_template.jinja": "{{ x }}",
        "tokenizer.json": bytes_tokenizer().to_json(),
        "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
    }
    export_transformers(
        native, tmp_path / "exported", companions=companions,
        primary_config={"model_type": "llama"},
        metrics={"val_loss": 3.5, "val_loss_p": float("nan")},
    )  # fmt: skip
    twin: Any = twin_of(native)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 51}
    expected = twin.generate(torch.tensor([[1, 2, 3]]), **options)[0].tolist()
    again = tmp_path / "again"
    assert load_without_us(tmp_path / "exported", again, tmp_path / "cache") == expected
    for folder in (tmp_path / "exported", again):
        assert_same_tensors(load_model(folder), native)
        for name in CODE_FILES:
            source = Path(sys.modules[DualFlowForCausalLM.__module__].__file__ or "").parent / name
            assert (folder / name).read_bytes() == source.read_bytes()
    assert read_primary_config(tmp_path / "exported") == {"model_type": "llama"}
    assert json.loads((tmp_path / "exported" / "metrics.json").read_text()) == {
        "val_loss": 3.5, "val_loss_p": None,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_an_export_has_the_number_format_asked_for(dtype: Any, tmp_path: Path) -> None:
    native = tiny_model(UNTIED, dtype=torch.bfloat16)
    export_transformers(native, tmp_path / "out", dtype=dtype)
    expected = "bfloat16" if dtype == "auto" else dtype
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == expected
    assert_same_tensors(loaded, native.to(loaded.dtype))


def test_exports_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    large: Any = tiny_model(UNTIED, dtype=torch.float32)
    with torch.no_grad():
        large.model.norm.weight[0] = 1e5
    with pytest.raises(ValueError, match=r"model.norm.weight: 1 of 32 values are too large"):
        export_transformers(large, tmp_path / "out", dtype="float16")
    with pytest.raises(ValueError, match="dtype is 'int8'; expected one of auto"):
        export_transformers(large, tmp_path / "out", dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matrices are int8"):
        export_transformers(quantise_model(build_model(tiny_config()), "int8"), tmp_path / "out")
    with pytest.raises(ValueError, match="variant is 'phd2'"):
        export_transformers(build_model(tiny_config("phd2")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_copies_of_the_code_are_whole() -> None:
    folder = Path(sys.modules[DualFlowForCausalLM.__module__].__file__ or "").parent
    assert {path.name for path in folder.glob("*_dualflow.py")} == set(CODE_FILES)
    for name in CODE_FILES:
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            if line.startswith(("import ", "from ")):
                assert line.split()[1].split(".")[0] in ("", "math", "collections", "dataclasses",
                    "pathlib", "typing", "torch", "transformers"), line  # fmt: skip
