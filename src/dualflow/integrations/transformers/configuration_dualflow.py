"""Configuration of a Dual-Flow Transformer for the `transformers` library.

This file and ``modeling_dualflow.py`` are all that a checkpoint folder needs beside its weights:
they import torch, transformers and the standard library alone, and are copied into such folders.
"""

from typing import Any, ClassVar

from transformers import PretrainedConfig

FORMAT_VERSION = 1

AUX_DEFAULTS: dict[str, Any] = {
    "num_flows": 1,
    "couplings": ["query", "intermediate", "output"],
    "embedding": "own",
    "flow_norms": "shared",
    "owns": [],
    "lora_rank": 0,
    "experts_per_token": None,
    "routing": "independent",
    "expert_couplings": False,
}
"""The auxiliary flows: how many (q is their mean); which coupling vectors exist; whether a flow has
its own embedding E2 or is ``tied`` to E1; whether its norm gains are ``shared`` or ``separate``;
which of q_proj, o_proj, mlp, lm_head it owns, whole (rank 0) or as a LoRA on the shared ones.
"""

READOUT_DEFAULTS: dict[str, Any] = {
    "kind": "mixture",
    "alpha_gradient": True,
    "standalone_primary": False,
    "primary_loss_weight": 0.0,
}
"""How p and q become r: ``mixture`` αp + (1 − α)q with α = clip(Σp², ½, 1), ``learned`` with
α = σ(w · [1, logit Σp², logit Σq²]), ``aux_only`` q, ``primary_only`` p; whether p is a model in
its own right beside ``aux_only``; λ of −log r − λ log p.
"""

ROPE_DEFAULTS: dict[str, Any] = {
    "original_max_position": None,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "beta_slow": 1.0,
    "beta_fast": 32.0,
    "truncate": True,
    "attention_factor": None,
}
"""``rope_scaling``: with ``kind`` (linear, llama3, yarn) and ``factor``."""

SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size")
"""What every configuration must say."""

DEFAULTS: dict[str, Any] = {
    "variant": "standard",
    "real_vocab_size": None,
    "num_kv_heads": None,
    "head_dim": None,
    "max_position": 1024,
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "norm_offset": False,
    "norm_placement": "pre",
    "position": "rotary",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "local_rope_theta": None,
    "qk_norm": False,
    "qk_norm_span": "head",
    "attention_scale": None,
    "attention_softcap": None,
    "final_softcap": None,
    "sliding_window": None,
    "sliding_layers": None,
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp": "swiglu",
    "mlp_bias": False,
    "moe": None,
    "tie_embeddings": False,
    "scale_embeddings": False,
    "init_std": 0.02,
    "aux": None,
    "readout": READOUT_DEFAULTS,
}

_SMALLEST = {
    "vocab_size": 1024, "hidden_size": 32, "num_layers": 4, "num_heads": 2, "intermediate_size": 96,
}  # fmt: skip

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class DualFlowConfig(PretrainedConfig):
    """A dual-flow (or, with variant ``standard``, an ordinary) causal language model.

    config:          the model's own fields (``SIZES`` and ``DEFAULTS``), as dualflow's config.json
                     has them. What transformers calls ``hidden_size``, ``num_hidden_layers`` and so
                     on is derived from it.
    primary_config:  config.json of the family that the primary comes from, kept as it was.
    aux_mode:        ``on`` or ``off``: whether a forward pass that is not told runs the auxiliary
                     flows; off reads p alone.

    Raises ``ValueError``: a field that is not known, a variant or a weight format that this
    integration does not run.
    """

    model_type = "dualflow"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]
    # Read along where it lies beside model.safetensors, as in dualflow's own folders.
    extra_files: ClassVar[tuple[str, ...]] = ("aux.safetensors",)

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        primary_config: dict[str, Any] | None = None,
        format_version: int = FORMAT_VERSION,
        weights: dict[str, Any] | None = None,
        aux_mode: str = "on",
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        if format_version != FORMAT_VERSION:
            raise ValueError(f"format_version is {format_version!r}; expected {FORMAT_VERSION}")
        if weights is not None:
            raise ValueError(
                f"this folder holds {weights.get('format')} weights, which run in dualflow's own "
                "engine only; load the float model they were made from"
            )
        self.format_version, self.primary_config = format_version, primary_config
        self.aux_mode, self.use_cache = aux_mode, use_cache
        self.config = c = with_defaults(_SMALLEST if config is None else config)
        for name in SPECIAL_TOKENS:
            kwargs.setdefault(name, (primary_config or {}).get(name))
        heads = c["num_heads"]
        derived = {
            "vocab_size": c["vocab_size"],
            "hidden_size": c["hidden_size"],
            "intermediate_size": c["intermediate_size"],
            "num_hidden_layers": c["num_layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": heads if c["num_kv_heads"] is None else c["num_kv_heads"],
            "head_dim": c["hidden_size"] // heads if c["head_dim"] is None else c["head_dim"],
            "max_position_embeddings": c["max_position"],
            "tie_word_embeddings": c["tie_embeddings"],
            "initializer_range": c["init_std"],
            "sliding_window": c["sliding_window"],
            "layer_types": [
                "full_attention" if self.window_of(layer) is None else "sliding_attention"
                for layer in range(c["num_layers"])
            ],
        }
        super().__init__(**(kwargs | derived))

    def window_of(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, its own included; None: all of them."""
        slides = self.config["sliding_layers"] is None or layer in self.config["sliding_layers"]
        return self.config["sliding_window"] if slides else None

    @property
    def flows(self) -> dict[str, Any]:
        """What the auxiliary flows of a dual model are; empty for a standard one."""
        if self.config["variant"] == "standard":
            return {}
        return AUX_DEFAULTS if self.config["aux"] is None else self.config["aux"]

    @property
    def num_flows(self) -> int:
        """Auxiliary flows; 0 for a standard model."""
        return self.flows.get("num_flows", 0)

    @property
    def has_primary_readout(self) -> bool:
        """Whether p is trained to predict, so that the auxiliary may be left out."""
        readout = self.config["readout"]
        return readout["kind"] != "aux_only" or readout["standalone_primary"]

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate matrix beside its up matrix."""
        return self.config["mlp"] in ("swiglu", "geglu")


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Every field of ``config``, those it leaves out at their defaults. Raises ``ValueError``."""
    if absent := [name for name in SIZES if config.get(name) is None]:
        raise ValueError(f"config lacks {', '.join(absent)}")
    full = _filled(config, dict.fromkeys(SIZES) | DEFAULTS, "config")
    full["readout"] = _filled(full["readout"], READOUT_DEFAULTS, "config.readout")
    if full["rope_scaling"] is not None:
        known = {"kind": None, "factor": None} | ROPE_DEFAULTS
        full["rope_scaling"] = _filled(full["rope_scaling"], known, "config.rope_scaling")
    if full["moe"] is not None:
        raise ValueError(
            "the model has mixtures of experts (moe), which the transformers integration does not "
            "run yet; export its primary with `dualflow export --format huggingface`"
        )
    if full["variant"] not in ("standard", "dual"):
        raise ValueError(
            f"variant is {full['variant']!r}; the transformers integration runs 'standard' and "
            "'dual', dualflow itself the others"
        )
    if full["aux"] is not None:
        if full["variant"] == "standard":
            raise ValueError("config.aux is set, but variant is 'standard'; flows belong to 'dual'")
        full["aux"] = _filled(full["aux"], AUX_DEFAULTS, "config.aux")
    return full


def _filled(given: dict[str, Any], known: dict[str, Any], where: str) -> dict[str, Any]:
    if unknown := sorted(given.keys() - known.keys()):
        raise ValueError(
            f"{where} has {', '.join(unknown)}, which this version does not know; known: "
            f"{', '.join(known)}"
        )
    return known | {
        name: list(value) if isinstance(value, tuple) else value for name, value in given.items()
    }
