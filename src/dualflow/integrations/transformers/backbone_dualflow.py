"""The flows of a Dual-Flow Transformer up to their final states, for the `transformers` library.

The primary runs at every position and fills the cache; the auxiliary flows run at the positions
they are asked for, read that cache and leave nothing behind. Shapes as in ``layer_dualflow``.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from .attention_dualflow import Positions, Sight, rotary_table, wide
from .configuration_dualflow import SPECIAL_TOKENS, DualFlowConfig
from .layer_dualflow import (
    DualFlowAuxLayer,
    DualFlowLayer,
    DualFlowRMSNorm,
    make_norm,
    own,
    own_matrix,
)

_AUX_FILE = "aux.safetensors"
# transformers renamed the output that holds the cache during 5.x.
CACHE = (
    "cache" if "cache" in {f.name for f in fields(BaseModelOutputWithPast)} else "past_key_values"
)


@dataclass
class DualFlowModelOutput(BaseModelOutputWithPast):
    """``last_hidden_state`` [B, S, D] of the primary and ``aux_hidden_state`` [F, B, A, D]."""

    aux_hidden_state: Tensor | None = None


class DualFlowAuxModel(nn.Module):
    """One flow's own parameters outside the layers; what it does not own is None."""

    def __init__(self, config: DualFlowConfig) -> None:
        super().__init__()
        aux = config.flows
        e2 = nn.Embedding(config.vocab_size, config.hidden_size)
        self.add_module("embed_tokens", e2 if aux["embedding"] == "own" else None)
        separate = aux["flow_norms"] == "separate"
        self.add_module("norm", make_norm(config, config.hidden_size) if separate else None)
        head = nn.Linear(
            config.hidden_size, config.vocab_size, bias=False, device="meta"
        )  # its sizes
        self.add_module("lm_head", own_matrix(config, "lm_head", head))


class DualFlowAlpha(nn.Module):
    """The three numbers of a learned mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


class DualFlowPreTrainedModel(PreTrainedModel):
    """Loading, saving and initial values."""

    config: DualFlowConfig
    config_class = DualFlowConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DualFlowLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["cache", "past_key_values"]
    _supports_sdpa = True
    # The Trainer then leaves dividing by the number of counted labels to the model.
    accepts_loss_kwargs = True

    def _init_weights(self, module: nn.Module) -> None:
        """Normal(0, init_std), smaller where a matrix writes to the residual stream; gains 1;
        couplings, biases, a LoRA's second matrix and a learned α's numbers 0.
        """
        std = self.config.config["init_std"]
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std * getattr(module, "starts_at", 1.0))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, DualFlowRMSNorm):
            nn.init.constant_(module.weight, 0.0 if module.offset else 1.0)
        elif isinstance(module, DualFlowAlpha):
            nn.init.zeros_(module.weight)
        elif isinstance(module, DualFlowAuxLayer):
            for vector in module.parameters(recurse=False):
                nn.init.zeros_(vector)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but strict: a tensor missing or with nowhere to go is an error.

        Reads what ``save_pretrained`` and dualflow write (there, the auxiliary's tensors lie in a
        file of their own). Raises ``ValueError``; with ``output_loading_info=True`` the lists of
        such tensors are returned instead.
        """
        report = kwargs.pop("output_loading_info", False)
        path = Path(str(pretrained_model_name_or_path))
        apart = (path / kwargs.get("subfolder", "") / _AUX_FILE).is_file()
        if apart and not hasattr(PretrainedConfig, "extra_files"):
            raise ValueError(
                f"{path} keeps the auxiliary flow in {_AUX_FILE}, which this transformers does not "
                "read; write one file with `dualflow export --format transformers`"
            )
        resizes = kwargs.pop("ignore_mismatched_sizes", False)
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True,
            ignore_mismatched_sizes=True, **kwargs,  # they are told below, by name
        )  # fmt: skip
        model, info = loaded
        settings = getattr(model, "generation_config", None)
        for name in SPECIAL_TOKENS:  # dualflow's config.json has them in primary_config alone
            if settings is not None and getattr(settings, name) is None:
                setattr(settings, name, getattr(model.config, name))
        kinds = [] if report else ["missing_keys", "unexpected_keys"]
        kinds += [] if resizes else ["mismatched_keys"]
        problems = [
            f"{kind.removesuffix('_keys')} {', '.join(sorted(map(str, info[kind]))[:8])}"
            for kind in kinds
            if info.get(kind)
        ]
        if problems:
            raise ValueError(f"{path} does not fit its config.json: {'; '.join(problems)}")
        return (model, info) if report else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers; every tensor goes into ``model*.safetensors``."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):  # what an earlier model left there
            (Path(save_directory) / _AUX_FILE).unlink(missing_ok=True)

    def freeze_primary(self) -> None:
        """Train the auxiliary flows alone. Raises ``ValueError`` where there are none."""
        if not self.config.num_flows:
            raise ValueError("this model has no auxiliary flow to train beside a frozen primary")
        for name, parameter in self.named_parameters():
            if not is_aux(name):
                parameter.requires_grad_(False)


def is_aux(name: str) -> bool:
    """Whether a parameter belongs to the auxiliary flows, by its name."""
    parts = name.split(".")
    return "aux" in parts or "aux_readout" in parts


class DualFlowModel(DualFlowPreTrainedModel):
    """Embeddings, layers and final norm of both flows."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^lm_head\.", r"^aux_readout\."]

    def __init__(self, config: DualFlowConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        learned = config.config["position"] == "learned"
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, size) if learned else None
        )
        self.layers = nn.ModuleList(
            DualFlowLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config, size)
        self.aux = nn.ModuleList(DualFlowAuxModel(config) for _ in range(config.num_flows))
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        aux_at: Positions | None = None,
        cache: Cache | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> DualFlowModelOutput:
        """Final states of the primary at every position and of the flows at positions ``aux_at``.

        input_ids:       [B, S]; may be left out for ``inputs_embeds`` [B, S, D], from which only
                         flows that share E1 can start.
        attention_mask:  [B, past + S], 0 at padding, which belongs on the left.
        position_ids:    [B or 1, S]; by default counted over what is no padding. Where they begin
                         anew inside a row, without mask and cache, texts do not see each other.
        past_key_values, cache: the same, under transformers' older and newer name.
        aux_at:          a slice, or indices [A], of the S positions; None: no auxiliary rows.
        """
        cache = past_key_values if cache is None else cache
        if input_ids is None and inputs_embeds is None:
            raise ValueError("the model got neither input_ids nor inputs_embeds")
        h1 = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        keeps = self.config.use_cache if use_cache is None else use_cache
        if self.training and torch.is_grad_enabled() and use_cache is None:
            keeps = False
        past = 0 if cache is None else int(cache.get_seq_length())
        mask = _padding(attention_mask, past + h1.shape[1])
        sight = self._sight(h1, mask, position_ids, past, cache, aux_at)
        if keeps and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = _positions(mask, past, h1)
        h1, h2 = self._embed(input_ids, h1, position_ids, aux_at)
        rotary = {}
        if self.config.config["position"] == "rotary":
            wide_positions = position_ids.to(wide(h1.dtype))
            for kind in set(self.config.layer_types):
                local = kind == "sliding_attention"
                rotary[kind] = rotary_table(wide_positions, self.config, local)
        at, states = slice(0, 0) if aux_at is None else aux_at, [h1]
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            h1, h2 = layer(h1, h2, at, sight, rotary.get(kind), cache=cache)
            states.append(h1)
        norms = own(self.aux, "norm")
        h1 = self.norm(h1)
        if len(h2) and any(norms):
            h2 = torch.stack([norm(h) for norm, h in zip(norms, h2, strict=True)])
        elif len(h2):
            h2 = self.norm(h2)
        return DualFlowModelOutput(
            last_hidden_state=h1,
            aux_hidden_state=h2 if len(h2) else None,
            hidden_states=(*states[:-1], h1) if output_hidden_states else None,
            **{CACHE: cache if keeps else None},  # type: ignore[arg-type]
        )

    def _embed(
        self, input_ids: Tensor | None, h1: Tensor, positions: Tensor, at: Positions | None
    ) -> tuple[Tensor, Tensor]:
        if at is None or not self.config.num_flows:
            h2 = h1.new_empty(0, h1.shape[0], 0, h1.shape[-1])
        else:
            tables = own(self.aux, "embed_tokens")
            if input_ids is None and any(tables):
                raise ValueError(
                    "the auxiliary flow has an embedding of its own and needs input_ids beside "
                    "inputs_embeds; or run with aux='off'"
                )
            rows = [h1[:, at] if table is None else table(input_ids[:, at]) for table in tables]  # type: ignore[index]
            h2 = torch.stack(rows)
        if self.config.config["scale_embeddings"]:
            scale = h1.new_tensor(self.config.hidden_size**0.5)  # rounded, as the models trained
            h1, h2 = h1 * scale, h2 * scale
        if self.embed_positions is not None:
            if int(positions.max()) >= self.config.max_position_embeddings:
                raise ValueError(
                    f"position {int(positions.max()):,} was asked for, but the model has "
                    f"{self.config.max_position_embeddings:,} positions"
                )
            learned = self.embed_positions(positions)
            h1 = h1 + learned
            h2 = h2 + learned[:, at] if len(h2) else h2
        return h1, h2

    def _sight(
        self, h1: Tensor, mask: Tensor | None, position_ids: Tensor | None, past: int,
        cache: Cache | None, at: Positions | None,
    ) -> Sight:  # fmt: skip
        documents = None
        if position_ids is not None and mask is None and cache is None:
            jumps = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
            documents = jumps.cumsum(-1) if jumps[:, 1:].any() else None
        simple = at is None or (isinstance(at, slice) and at in (slice(None), slice(-1, None)))
        return Sight(mask, documents, past, h1.shape[1], not simple, h1.device)


def _padding(attention_mask: Tensor | None, total: int) -> Tensor | None:
    """[B, total], False at padding; None: there is none."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < total:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected [batch, {total}], "
            "0 at padding"
        )
    real = attention_mask[:, :total].bool()
    if real.all():
        return None
    return real


def _positions(real: Tensor | None, past: int, h1: Tensor) -> Tensor:
    if real is None:
        return torch.arange(past, past + h1.shape[1], device=h1.device)[None]
    return (real.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
