"""Which optimizer updates which parameter, and the optimizers' state by parameter name.

The rule, first match wins:

==============  ======================================================  =======  =====
group           parameters                                              by       decay
==============  ======================================================  =======  =====
``hidden``      matrices of the layers (``layers.N...._proj.weight``),  Muon*    yes
                those a flow owns too
``experts``     matrices of experts, stacked; each for itself            Muon*    yes
``embeddings``  ``embed_tokens``, ``embed_positions`` of every flow;    AdamW    no
                a tied head is an embedding
``vectors``     whatever has one dimension: gains, biases, couplings,   AdamW    no
                the three numbers of a learned readout
``matrices``    what is left: heads, LoRA, the second state of the      AdamW    yes
                two-softmax control
==============  ======================================================  =======  =====

(*) AdamW under ``kind = "adamw"``. Frozen parameters are in no group. Muon orthogonalises whole
matrices, so it must see them whole: under sharded parameters it needs the gathered gradient.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dualflow.model.quantise import quantised_matrices
from dualflow.train.config import OptimizerConfig
from dualflow.train.expert_muon import ExpertMuon

OptimizerName = Literal["muon", "expert_muon", "adamw"]

_HIDDEN = re.compile(r"(^|\.)layers\.\d+\..*_proj\.weight$")
_EMBEDDING = re.compile(r"(^|\.)embed_(tokens|positions)\.weight$")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that one optimizer updates alike. ``lr`` is the peak rate, before the schedule's
    factor.
    """

    name: str
    optimizer: OptimizerName
    lr: float
    weight_decay: float
    parameters: tuple[str, ...]


def group_name(parameter: str, num_dimensions: int) -> str:
    """The group of the rule above that a parameter belongs to, by its name and number of
    dimensions.
    """
    if num_dimensions == 3:
        return "experts"
    if num_dimensions == 2 and _HIDDEN.search(parameter):
        return "hidden"
    if _EMBEDDING.search(parameter):
        return "embeddings"
    is_vector = num_dimensions < 2 or parameter.endswith("_coupling")  # of every expert
    return "vectors" if is_vector else "matrices"


def assign_groups(model: nn.Module, config: OptimizerConfig) -> list[ParameterGroup]:
    """Every trainable parameter of ``model`` in exactly one group, in the model's order; empty
    groups are left out.
    """
    names = ("hidden", "experts", "embeddings", "vectors", "matrices")
    members: dict[str, list[str]] = {name: [] for name in names}
    for name, parameter in _trainable(model).items():
        members[group_name(name, parameter.ndim)].append(name)
    if not any(members.values()):
        raise ValueError("nothing to train: every parameter of the model is frozen")
    return [_settings(name, tuple(names), config) for name, names in members.items() if names]


def _settings(name: str, parameters: tuple[str, ...], config: OptimizerConfig) -> ParameterGroup:
    if name in ("hidden", "experts") and config.kind == "muon":
        decay = (
            config.weight_decay if config.muon_weight_decay is None else config.muon_weight_decay
        )
        optimizer = "muon" if name == "hidden" else "expert_muon"
        return ParameterGroup(name, optimizer, config.muon_lr, decay, parameters)
    own = {"embeddings": config.embedding_lr, "vectors": config.vector_lr}.get(name)
    lr = config.lr if own is None else own
    decay = config.weight_decay if name in ("hidden", "experts", "matrices") else 0.0
    return ParameterGroup(name, "adamw", lr, decay, parameters)


class Optimizers:
    """Muon and AdamW stepping together over the groups of one model, with their state by parameter
    name.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, groups: list[ParameterGroup] | None = None
    ):
        """groups: None takes ``assign_groups``. Raises ``ValueError`` unless they cover what is
        trainable once.
        """
        self.groups = assign_groups(model, config) if groups is None else groups
        self.parameters = _trainable(model)
        check_cover(self.groups, self.parameters)
        self._lr, self._factor = config.lr, 1.0
        self._optimizers: dict[OptimizerName, torch.optim.Optimizer] = {}
        kinds: list[OptimizerName] = [group.optimizer for group in self.groups]
        for name in dict.fromkeys(kinds):
            own = [self._torch_group(group) for group in self.groups if group.optimizer == name]
            self._optimizers[name] = _build(name, own, config)

    def _torch_group(self, group: ParameterGroup) -> dict[str, Any]:
        parameters = [self.parameters[name] for name in group.parameters]
        return {
            "params": parameters,
            "lr": group.lr,
            "weight_decay": group.weight_decay,
            "peak_lr": group.lr,
        }

    def set_factor(self, factor: float) -> None:
        """Set every group's learning rate to its peak times the schedule's ``factor``."""
        self._factor = factor
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor

    @property
    def learning_rate(self) -> float:
        """The present rate of AdamW's plain groups: the peak ``lr`` times the schedule's factor."""
        return self._lr * self._factor

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for optimizer in self._optimizers.values():
            optimizer.step()

    def gradients(self) -> list[Tensor]:
        """The gradients there are, in the model's order."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state as ``{"adamw/NAME/exp_avg": tensor, ...}``: momenta, second moments, step
        counters.
        """
        tensors: dict[str, Tensor] = {}
        for kind, name, parameter in self._owned():
            for key, value in self._optimizers[kind].state.get(parameter, {}).items():
                tensors[f"{kind}/{name}/{key}"] = value
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what ``state_tensors`` gave, bit for bit and in the same number formats.

        Raises ``ValueError`` where a name or shape does not belong to this model and these groups.
        """
        states: dict[tuple[str, str], dict[str, Tensor]] = {}
        for full, value in tensors.items():
            kind, _, rest = full.partition("/")
            name, _, key = rest.rpartition("/")
            states.setdefault((kind, name), {})[key] = value
        for kind, name, parameter in self._owned():
            state = states.pop((kind, name), {})
            for key, value in state.items():
                if value.ndim and value.shape != parameter.shape:
                    raise ValueError(
                        f"optimizer state {kind}/{name}/{key} has shape {list(value.shape)}, "
                        f"the parameter {list(parameter.shape)}"
                    )
            if state:
                self._optimizers[kind].state[parameter] = {
                    key: _placed(value, parameter) for key, value in state.items()
                }
        if states:
            left = ", ".join(f"{kind}/{name}" for kind, name in sorted(states)[:5])
            raise ValueError(
                f"optimizer state of parameters this run does not train that way: {left}"
            )

    def table(self) -> str:
        """The groups with their settings and every parameter's name and shape (equal layers in one
        line), for the log of a run's start.
        """
        lines: list[str] = []
        for group in self.groups:
            count = sum(self.parameters[name].numel() for name in group.parameters)
            lines.append(
                f"{group.name}: {group.optimizer}, peak lr {group.lr:g}, "
                f"weight decay {group.weight_decay:g}, "
                f"{len(group.parameters)} tensors, {count:,} parameters"
            )
            lines += [f"  {name}" for name in _by_layers(group.parameters, self.parameters)]
        return "\n".join(lines)

    def _owned(self) -> Iterable[tuple[OptimizerName, str, nn.Parameter]]:
        for group in self.groups:
            for name in group.parameters:
                yield group.optimizer, name, self.parameters[name]


def check_cover(groups: Iterable[ParameterGroup], trainable: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless every trainable parameter is in exactly one group and nothing
    else is in any.
    """
    counts = dict.fromkeys(trainable, 0)
    for group in groups:
        for name in group.parameters:
            if name not in counts:
                raise ValueError(
                    f"group {group.name!r} holds {name}, which is frozen or not in the model"
                )
            counts[name] += 1
    if missing := [name for name, count in counts.items() if count == 0]:
        raise ValueError(f"in no optimizer group, so never updated: {', '.join(missing[:5])}")
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"in more than one optimizer group: {', '.join(twice[:5])}")


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, each tensor once (a tied head goes by the embedding's name).

    Raises ``ValueError`` where matrices are quantised: they are no parameters, and what is left
    would be trained without them.
    """
    if matrices := quantised_matrices(model):
        raise ValueError(
            f"a model with {next(iter(matrices.values())).kind} weights cannot be trained; "
            "train the float model and quantise the result"
        )
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def _build(
    name: OptimizerName, groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    if name != "adamw":
        return (torch.optim.Muon if name == "muon" else ExpertMuon)(
            groups,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            ns_steps=config.muon_steps,
            adjust_lr_fn=config.muon_lr_adjust,
        )
    beta1, beta2 = config.betas
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, betas=(beta1, beta2), eps=config.eps, fused=fused)


def _by_layers(names: Iterable[str], parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Names with shapes; those that differ by the layer's number alone as one:
    ``layers.{0..2}.mlp.up_proj...``.
    """
    layers: dict[tuple[str, str, str], list[str]] = {}
    for name in names:
        before, number, after = (*re.split(r"(?<=layers)\.(\d+)\.", name, maxsplit=1), "", "")[:3]
        layers.setdefault((before, after, str(list(parameters[name].shape))), []).append(number)
    lines: list[str] = []
    for (before, after, shape), numbers in layers.items():
        where = f".{_numbers(numbers)}." if after else ""
        lines.append(f"{before}{where}{after} {shape}")
    return lines


def _numbers(numbers: list[str]) -> str:
    """``7``, or ``{0..3,5}`` of several."""
    if len(numbers) == 1:
        return numbers[0]
    parts: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    ranges = (f"{p[0]}..{p[-1]}" if len(p) > 2 else ",".join(map(str, p)) for p in parts)
    return f"{{{','.join(ranges)}}}"


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    return value.to(parameter.device, copy=True)
