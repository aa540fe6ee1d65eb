"""Models for runs to begin from."""

from pathlib import Path

import torch

from dualflow.checkpoint.atomic import atomic_folder
from dualflow.checkpoint.companions import write_companions
from dualflow.checkpoint.store import write_model
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.model import CausalLM, build_model
from dualflow.spec import AuxConfig
from dualflow.testing.configs import tiny_config

PRIMARY_CONFIG = {"model_type": "llama", "hidden_size": 32, "torch_dtype": "bfloat16"}
LORA = AuxConfig(owns=("q_proj", "mlp"), lora_rank=2)


def standard_model() -> CausalLM:
    """A bfloat16 model with one float32 tensor; its vocabulary has rows that no text can use."""
    config = tiny_config("standard", vocab_size=264, real_vocab_size=261, init_std=0.1)
    model = build_model(config, seed=5).to(torch.bfloat16)
    model.model.norm.weight.data = torch.full((32,), 1.001, dtype=torch.float32)
    return model


def write_initial(folder: Path, model: CausalLM) -> Path:
    companions = {
        "tokenizer.json": bytes_tokenizer().to_json(),
        "tokenizer_config.json": '{"eos_token": "<|endoftext|>"}',
        "generation_config.json": '{"eos_token_id": [256]}',
        "chat_template.jinja": "{{ messages }}\r\n",
    }
    with atomic_folder(folder, replaceable=lambda _: True) as temporary:
        write_model(model, temporary, primary_config=PRIMARY_CONFIG)
        write_companions(temporary, companions)
    return folder
