"""Our adapter of lm-eval against lm-eval's own, which runs the exported model in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from dualflow.checkpoint import load_model, save_model
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig
from dualflow.testing.tensors import tiny_model

POSITIONS = 48
CONFIG = ModelConfig(
    variant="dual", vocab_size=259, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    intermediate_size=48, max_position=POSITIONS,
    aux=AuxConfig(owns=("q_proj", "o_proj"), lora_rank=2),
)  # fmt: skip
PAIRS = [
    ("What is", " a bee"), ("What is", " it"), ("What is", "?"), ("", "alone"), ("so  ", "on"),
    ("a long context " * 5, " ends"),
]  # fmt: skip
TEXTS = [("The quick brown fox jumps over the lazy dog. " * 3,), ("short",)]
PROMPTS = [("Go", {"until": ["\n"], "max_gen_toks": 9}), ("Stay", {"until": [" "]})]


def both(folder: Path, readout: ReadoutConfig) -> tuple[Any, Any]:
    """Our adapter and lm-eval's, of one model, both computing in float64."""
    import transformers
    from lm_eval.models import huggingface

    from dualflow.integrations.lm_eval import DualFlowLM
    from dualflow.integrations.transformers.export import export_transformers

    source = ModelConfig(**{**CONFIG.__dict__, "readout": readout})
    tokenizer_json = bytes_tokenizer().to_json()
    save_model(tiny_model(source), folder / "ours", tokenizer_json=tokenizer_json)
    texts = {"tokenizer.json": tokenizer_json}
    export_transformers(load_model(folder / "ours"), folder / "theirs", companions=texts)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "theirs", trust_remote_code=True, dtype=torch.float64
    )
    end = bytes_tokenizer().eos_token
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "theirs/tokenizer.json"), eos_token=end, pad_token=end
    )
    build: Any = huggingface.HFLM
    theirs = build(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=POSITIONS)
    return DualFlowLM(folder / "ours", weights="float64", device="cpu", threads=1), theirs


def ask(kind: Any, arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


@pytest.mark.parametrize("kind", ["mixture", "learned"])
def test_every_kind_of_request_has_the_same_answer(tmp_path: Path, kind: Any):
    ours, theirs = both(tmp_path, ReadoutConfig(kind=kind))
    assert ours.max_length == theirs.max_length
    assert ours.prefix_token_id == theirs.prefix_token_id
    requests = ask("loglikelihood", PAIRS)
    found, wanted = (one.loglikelihood(requests, disable_tqdm=True) for one in (ours, theirs))
    for (score, greedy), (their_score, their_greedy) in zip(found, wanted, strict=True):
        assert score == pytest.approx(their_score, abs=1e-6)
        assert greedy == their_greedy
    requests = ask("loglikelihood_rolling", TEXTS)
    found, wanted = (one.loglikelihood_rolling(requests) for one in (ours, theirs))
    assert found == pytest.approx(wanted, abs=1e-6)
    requests = ask(
        "generate_until", [(text, {"max_gen_toks": 9, **more}) for text, more in PROMPTS]
    )
    found, wanted = (one.generate_until(requests) for one in (ours, theirs))
    assert found == wanted
