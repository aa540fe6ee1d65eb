"""What a family is: how its config.json and its tensors say what a model of ours is."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dualflow import config as configuration
from dualflow.checkpoint.families.keys import IRRELEVANT, NEUTRAL, Part
from dualflow.checkpoint.families.names import Names
from dualflow.spec import ModelConfig, MoEConfig, standard_twin

FIELDS = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "intermediate_size": "intermediate_size",
    "max_position": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings", "init_std": "initializer_range",
}  # fmt: skip
"""Fields of ``ModelConfig`` that are a key of config.json each, in most families."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of checkpoints.

    model_type:     config.json's.
    architectures:  names of the class with its head, which is written, and of the one without.
    fields:         fields of ``ModelConfig`` and the key each is a copy of.
    defaults:       what a missing key means: the values of the family's configuration class.
    switches:       fields of ``ModelConfig`` that are the same in all its models.
    parts:          groups of keys that mean something together.
    neutral:        keys with the values at which they change nothing; any other is refused.
    irrelevant:     keys that never change what the model computes, beside ``keys.IRRELEVANT``.
    names:          what its tensors are called.
    read_names:     what else they are called in folders that are read; each has its ``sign``.
    whole_heads:    whether hidden_size must be a multiple of the number of heads.
    """

    model_type: str
    architectures: tuple[str, str]
    defaults: Mapping[str, Any]
    fields: Mapping[str, str] = field(default_factory=lambda: FIELDS)
    switches: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    irrelevant: frozenset[str] = frozenset()
    names: Names = field(default_factory=Names)
    read_names: tuple[Names, ...] = ()
    whole_heads: bool = False

    def read(self, table: Mapping[str, Any]) -> ModelConfig:
        """The standard model that a config.json describes.

        Raises ``ValueError`` naming the key and its value: not known, not supported, or wrong.
        """
        self._check_keys(table)
        whole = {**self.defaults, **table}
        values = {ours: whole[key] for ours, key in self.fields.items()}
        values |= self.switches
        for part in self.parts:
            values |= part.read(whole)
        try:
            config = configuration.from_dict(ModelConfig, values)
        except ValueError as error:
            ours, colon, rest = str(error).partition(":")
            raise ValueError(f"{self.fields.get(ours, ours)}{colon}{rest}") from error
        plain = config.hidden_size % config.num_heads == 0 and (
            config.head_dim == config.hidden_size // config.num_heads
        )
        return dataclasses.replace(config, head_dim=None) if plain else config

    def names_in(self, stored: Collection[str]) -> Names:
        """What the tensors of a folder are called that stores these."""
        signs = {names.sign: names for names in self.read_names}
        found = (signs[sign] for sign in signs if any(name.endswith(sign) for name in stored))
        return next(found, self.names)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """A config.json with what this family can say of ``config``; what ``read`` makes of it may
        still be another model.
        """
        explicit = dataclasses.replace(
            config, num_kv_heads=config.kv_heads, head_dim=config.head_size
        )
        table: dict[str, Any] = {
            "architectures": [self.architectures[0]],
            "model_type": self.model_type,
            **{key: getattr(explicit, ours) for ours, key in self.fields.items()},
        }
        for part in self.parts:
            table |= part.write(config)
        return table

    def refuses(self, config: ModelConfig) -> list[str]:
        """What transformers does not accept in this family although config.json can say it."""
        if self.whole_heads and config.hidden_size % config.num_heads:
            return [
                f"hidden_size is {config.hidden_size}, in {self.model_type} a multiple of num_heads"
            ]
        return []

    def _check_keys(self, table: Mapping[str, Any]) -> None:
        known = {"model_type", "architectures", *self.fields.values(), *IRRELEVANT}
        known |= self.irrelevant.union(*(part.keys for part in self.parts))
        neutral, wrong = {**NEUTRAL, **self.neutral}, []
        for key, value in table.items():
            if key in known or value is None:
                continue
            if key not in neutral:
                wrong.append(f"{key} = {_short(value)} is not known")
            elif not any(value == ok and type(value) is type(ok) for ok in neutral[key]):
                expected = " or ".join(repr(ok) for ok in neutral[key]) or "none"
                wrong.append(f"{key} = {_short(value)} is not supported (expected {expected})")
        if wrong:
            raise ValueError("; ".join(wrong[:8]))


def canonical(config: ModelConfig) -> ModelConfig:
    """The primary of ``config`` with everything said in one way, so that equal models compare
    equal; what changes no logits (padding rows, initial values) is left out.
    """
    c = dataclasses.replace(standard_twin(config), real_vocab_size=None, init_std=0.02)
    slides = tuple(layer for layer in range(c.num_layers) if c.window_of(layer) is not None)
    local = c.local_rope_theta
    if local is None and slides and c.rope_scaling is None and c.position == "rotary":
        local = c.rope_theta
    scale = c.attention_scale
    return dataclasses.replace(
        c,
        num_kv_heads=c.kv_heads,
        head_dim=c.head_size,
        attention_scale=c.head_size**-0.5 if scale is None else scale,
        qk_norm_span=c.qk_norm_span if c.qk_norm else "head",
        rope_theta=c.rope_theta if c.position == "rotary" else 10000.0,
        sliding_window=c.sliding_window if slides else None,
        sliding_layers=slides if slides else None,
        local_rope_theta=local if slides else None,
        moe=(moe := _canonical_experts(c)),
        # Of no layer, where all have experts.
        intermediate_size=1 if moe and not moe.dense_layers else c.intermediate_size,
    )


def _canonical_experts(config: ModelConfig) -> MoEConfig | None:
    """The same of experts; None where every layer is dense."""
    moe = config.moe
    if moe is None or not any(map(config.has_experts, range(config.num_layers))):
        return None
    # A row may choose in all groups: then they are none.
    grouped = moe.groups_per_token < moe.num_groups
    return dataclasses.replace(
        moe,
        dense_layers=tuple(sorted(set(moe.dense_layers))),
        num_groups=moe.num_groups if grouped else 1,
        groups_per_token=moe.groups_per_token if grouped else 1,
        balance_weight=0.0,
        z_weight=0.0,
        bias_rate=0.0,
    )


def differences(ours: ModelConfig, theirs: ModelConfig, where: str) -> list[str]:
    """In which fields two primaries differ: "norm_eps is 1e-05, in WHERE 1e-06"."""
    first, second = _values(canonical(ours)), _values(canonical(theirs))
    if (first["moe"] is None) != (second["moe"] is None):
        del first["intermediate_size"]  # said by that already
    return [
        f"{name} is {value!r}, in {where} {second[name]!r}"
        for name, value in first.items()
        if value != second.get(name, value)
    ]


def _values(config: ModelConfig) -> dict[str, Any]:
    """Every field by name, those of the experts as "moe.NAME" beside whether there are any."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    moe: MoEConfig | None = values["moe"]
    if moe is None:
        return values
    inside = {f"moe.{name}": value for name, value in dataclasses.asdict(moe).items()}
    return values | {"moe": "a mixture of experts"} | inside


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
