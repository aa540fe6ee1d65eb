"""A whole model as a Hugging Face folder that brings its own code: transformers loads it where
dualflow is not installed, and dualflow reads it back bit for bit.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from dualflow import config as configuration
from dualflow.checkpoint.atomic import atomic_folder, write_atomic
from dualflow.checkpoint.casting import cast
from dualflow.checkpoint.companions import write_companions
from dualflow.checkpoint.strict import PRIMARY_FILE, stored_tensors
from dualflow.checkpoint.tensors import save_tensors
from dualflow.integrations.transformers.configuration_dualflow import DualFlowConfig
from dualflow.model import CausalLM

ExportFormat = Literal["auto", "float32", "bfloat16", "float16"]

CODE_FILES = (
    "configuration_dualflow.py",
    "attention_dualflow.py",
    "layer_dualflow.py",
    "backbone_dualflow.py",
    "modeling_dualflow.py",
)
"""What a folder needs beside weights and config.json, copied as it is."""

_AUTO_MAP = {
    "AutoConfig": "configuration_dualflow.DualFlowConfig",
    "AutoModel": "backbone_dualflow.DualFlowModel",
    "AutoModelForCausalLM": "modeling_dualflow.DualFlowForCausalLM",
}

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_transformers(
    model: CausalLM,
    folder: str | Path,
    *,
    companions: Mapping[str, str] | None = None,
    primary_config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    dtype: ExportFormat = "auto",
) -> None:
    """Write ``model``, auxiliary flows included, to the new ``folder`` atomically.

    companions:      texts of tokenizer, chat template and generation settings by file name.
    primary_config:  config.json of the family that the primary was imported from.
    metrics:         recorded losses, for metrics.json.
    dtype:           the floating-point format of every tensor; ``auto`` keeps each as it is.

    ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` loads it, and where
    ``dualflow.integrations.transformers`` was imported no trust is needed. Raises ``ValueError``:
    quantised matrices, a variant that this integration does not run, values too large for
    ``dtype``, a ``folder`` that holds something.
    """
    if dtype not in get_args(ExportFormat):
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(get_args(ExportFormat))}")
    if model.quantised is not None:
        raise ValueError(
            f"the model's matrices are {model.quantised}, which transformers does not read; "
            "export the float model that they were made from"
        )
    wanted = _DTYPES.get(dtype)
    table = DualFlowConfig(
        config=configuration.to_dict(model.config),
        primary_config=None if primary_config is None else dict(primary_config),
        architectures=["DualFlowForCausalLM"],
        auto_map=dict(_AUTO_MAP),
        dtype=wanted or _main_dtype(model),
    )
    try:
        config_json = table.to_json_string()
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(
            f"transformers cannot write a config.json with this primary_config ({error})"
        ) from error
    tensors = {
        name: cast(tensor.detach(), wanted, name) for name, tensor in stored_tensors(model).items()
    }
    with atomic_folder(folder, replaceable=lambda _: False) as temporary:
        save_tensors(temporary / PRIMARY_FILE, tensors)
        _write(temporary / "config.json", config_json.encode())
        for name in CODE_FILES:
            _write(temporary / name, (Path(__file__).parent / name).read_bytes())
        write_companions(temporary, companions or {})
        if metrics:
            text = json.dumps(_finite(metrics), indent=2, allow_nan=False) + "\n"
            _write(temporary / "metrics.json", text.encode())


def _main_dtype(model: CausalLM) -> torch.dtype:
    """The format of most weights, which config.json names."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda kind: sizes[kind])


def _finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


def _write(path: Path, data: bytes) -> None:
    write_atomic(path, lambda temporary: temporary.write_bytes(data))
