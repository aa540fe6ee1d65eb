"""A mixture of experts in config.json: how many, how large, in which layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualflow.checkpoint.families.keys import whole_number
from dualflow.spec import ModelConfig

_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""What only training goes by. ``MoEConfig.balance_weight`` weighs another loss: theirs counts the
rows of all layers together, and each row as often as it has experts.
"""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The experts of a layer.

    counts:     keys of their number, which is ``default`` where none is given; the first is
                written.
    size:       the key of a routed expert's intermediate size.
    shared:     the key of the shared expert's, which is gated; None: there is no such expert.
    normalise:  the key of whether the chosen scores are divided by their sum; None: they are.
    some_dense: whether ``mlp_only_layers`` and ``decoder_sparse_step`` say which layers have none.
    """

    counts: tuple[str, ...] = ("num_experts", "num_local_experts")
    default: int
    size: str = "moe_intermediate_size"
    shared: str | None = None
    normalise: str | None = "norm_topk_prob"
    some_dense: bool = True

    @property
    def keys(self) -> frozenset[str]:
        keys = {*self.counts, self.size, self.shared, self.normalise, "num_experts_per_tok"}
        layers = ("mlp_only_layers", "decoder_sparse_step") if self.some_dense else ()
        return frozenset((*(key for key in keys if key is not None), *layers, *_TRAINING))

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        dense = self._dense(table)
        if len(dense) == table["num_hidden_layers"]:
            return {"moe": None}
        count, chosen = self._count(table), whole_number(table, "num_experts_per_tok")
        if chosen > count:
            raise ValueError(
                f"num_experts_per_tok = {chosen}, but there are {count} experts to choose from"
            )
        moe = {
            "num_experts": count,
            "experts_per_token": chosen,
            "expert_size": whole_number(table, self.size),
            "dense_layers": dense,
        }
        if self.normalise is not None:
            moe["normalise"] = table[self.normalise]
            if type(moe["normalise"]) is not bool:
                raise ValueError(f"{self.normalise} = {moe['normalise']!r}; expected true or false")
        if self.shared is not None:
            moe |= {"shared_size": whole_number(table, self.shared), "shared_gate": True}
        return {"moe": moe}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        moe = config.moe
        if moe is None:
            return {}
        table: dict[str, Any] = {
            self.counts[0]: moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            self.size: moe.expert_size,
        }
        if self.normalise is not None:
            table[self.normalise] = moe.normalise
        if self.shared is not None and moe.shared_size:
            table[self.shared] = moe.shared_size
        if self.some_dense:
            table |= {"mlp_only_layers": sorted(moe.dense_layers), "decoder_sparse_step": 1}
        return table

    def _count(self, table: Mapping[str, Any]) -> int:
        given = [key for key in self.counts if table.get(key) is not None]
        if not given:
            return self.default
        numbers = [whole_number(table, key) for key in given]
        if len(set(numbers)) > 1:
            listed = " and ".join(f"{key} = {table[key]}" for key in given)
            raise ValueError(f"{listed} are both given; expected one of them")
        return numbers[0]

    def _dense(self, table: Mapping[str, Any]) -> list[int]:
        """The layers without experts."""
        if not self.some_dense:
            return []
        only, step = table["mlp_only_layers"], whole_number(table, "decoder_sparse_step")
        only = [] if only is None else only
        if not isinstance(only, list) or any(type(layer) is not int for layer in only):
            raise ValueError(f"mlp_only_layers = {str(only)[:40]}; expected a list of layers")
        named = set(only)
        return [
            layer
            for layer in range(whole_number(table, "num_hidden_layers"))
            if layer in named or (layer + 1) % step
        ]
