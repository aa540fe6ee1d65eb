"""Tiny models on disk, with a tokenizer of bytes, for verbs that generate."""

import dataclasses
from pathlib import Path
from typing import Any

from dualflow.checkpoint import save_model
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.model import build_model
from dualflow.spec import ModelConfig

CONFIG = ModelConfig(
    variant="dual", vocab_size=259, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16,
    max_position=128,
)  # fmt: skip

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny(folder: Path, *, chat: bool = False, seed: int = 0, **changes: Any) -> str:
    """A model in ``folder``, with a chat template if asked for; returns its path."""
    model = build_model(dataclasses.replace(CONFIG, **changes), seed=seed)
    save_model(model, folder, tokenizer_json=bytes_tokenizer().to_json())
    if chat:
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)
