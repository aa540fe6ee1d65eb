"""The two things that are trained: an auxiliary flow beside a frozen primary, and, as the control,
the primary itself with as many trainable parameters.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from scores import ROWS, Scores, joined, scores_of
from torch import Tensor, nn
from torch.nn import functional as F

from dualflow.checkpoint.retrofit import add_aux
from dualflow.data.loader import Batch
from dualflow.model import CausalLM
from dualflow.model.backbone import AuxRows
from dualflow.model.flows import LoRA
from dualflow.model.kv import BatchKV, Remembered
from dualflow.model.layer import Layer
from dualflow.model.rows import Kept
from dualflow.spec import AuxConfig, ReadoutConfig

ADAPTED = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def autocast() -> torch.autocast:
    """All matmuls run in bfloat16."""
    return torch.autocast("cpu", torch.bfloat16)


class PrimaryPass(NamedTuple):
    """What the frozen primary made of a batch: final states [T, D], each layer's intermediates, and
    the readers of its keys and values.
    """

    state_TD: Tensor
    kept: list[Kept]
    readers: list[Remembered]
    positions_T: Tensor


class Passes:
    """The primary's pass over each batch, made once: while it is frozen, every cell reads the same.

    name of a batch: what tells it from the others of this process.
    """

    def __init__(self, is_kept: bool = True) -> None:
        self._is_kept = is_kept
        self._passes: dict[str, PrimaryPass] = {}

    def over(self, name: str, batch: Batch, model: CausalLM) -> PrimaryPass:
        """The pass over ``batch``, from memory where it was made before."""
        if name in self._passes:
            return self._passes[name]
        count, length = batch.tokens_BS.shape
        positions_T = torch.arange(length).repeat(count)
        kv = BatchKV(count, length)
        readers = [Remembered(kv) for _ in model.model.layers]
        with torch.no_grad(), autocast():
            out = model.step(batch.tokens_BS.flatten(), positions_T, readers, keep=True)
        assert out.kept is not None
        made = PrimaryPass(out.primary_TD, out.kept, readers, positions_T)
        if self._is_kept:
            self._passes[name] = made
        return made

    def has(self, name: str) -> bool:
        """Whether the pass over the batch of this name is in memory."""
        return name in self._passes

    def forget(self, prefix: str) -> None:
        """Drop the batches whose name begins so."""
        self._passes = {k: v for k, v in self._passes.items() if not k.startswith(prefix)}


class Auxiliary:
    """An auxiliary flow on a frozen primary."""

    def __init__(self, primary: CausalLM, rank: int, objective: str, seed: int, passes: Passes):
        torch.manual_seed(seed)
        owns = ("q_proj", "o_proj", "mlp") if rank else ()
        aux = AuxConfig(owns=owns, lora_rank=rank)
        readout = ReadoutConfig(kind=objective)  # type: ignore[arg-type]
        self.model = add_aux(primary, aux, readout).train()
        self.model.freeze_primary()
        self._passes = passes
        self._given = primary
        _round_frozen(self.model)

    def loss(self, name: str, batch: Batch) -> Tensor:
        """Mean loss of the objective over a batch, 0-dim; autograd reaches the auxiliary alone."""
        primary, aux_FTD, targets_T = self._run(name, batch)
        total = aux_FTD.new_zeros(())
        for rows in _chunks(targets_T):
            states = primary.state_TD[rows], aux_FTD[:, rows]
            if self.model.config.readout.kind == "aux_only":  # p is not needed
                total = total - _log_prob_sum(self.model.aux_logits(states[1])[0], targets_T[rows])
            else:
                total = total - self.model.target_log_probs(*states, targets_T[rows]).r.sum()
        return total / (targets_T >= 0).sum()

    def score_p(self, name: str, batch: Batch) -> Scores:
        """The scores of p at every token of a batch."""
        return self._score_p(self._passes.over(name, batch, self.model), batch)

    def score_q(self, name: str, batch: Batch) -> Scores:
        """The scores of q at every token of a batch."""
        with torch.no_grad(), autocast():
            _, aux_FTD, targets_T = self._run(name, batch)
            return _score(lambda x_TD: self.model.aux_logits(x_TD[None])[0], aux_FTD[0], targets_T)

    def primary_scores(self, batch: Batch) -> Scores:
        """The scores of p by a pass of the primary made now."""
        return self._score_p(Passes(is_kept=False).over("", batch, self.model), batch)

    @property
    def weight_3(self) -> Tensor | None:
        """The trained numbers of a learned α."""
        readout = getattr(self.model, "aux_readout", None)
        return None if readout is None else readout.weight.detach()

    def check_frozen(self) -> None:
        """That training changed nothing of the primary, to the last bit."""
        given = dict(self._given.named_parameters())
        for name, tensor in self.model.named_parameters():
            if name in given:
                assert torch.equal(tensor, given[name].to(tensor.dtype)), f"{name} was trained"

    def _score_p(self, primary: PrimaryPass, batch: Batch) -> Scores:
        with torch.no_grad(), autocast():
            return _score(self.model.logits, primary.state_TD, batch.targets_BS.flatten())

    def _run(self, name: str, batch: Batch) -> tuple[PrimaryPass, Tensor, Tensor]:
        primary = self._passes.over(name, batch, self.model)
        tokens_T = batch.tokens_BS.flatten()
        rows = AuxRows(tokens_T, primary.positions_T, kept=primary.kept)
        none = tokens_T[:0]
        out = self.model.step(none, none, primary.readers, aux=rows)
        assert out.aux_FAD is not None
        return primary, out.aux_FAD, batch.targets_BS.flatten()


class AdaptedPrimary:
    """The control: the standard model's input embedding and a LoRA on the matrices that an
    auxiliary adapts. The head is a frozen copy, so decode costs what it did; prompts, keys and
    values are no longer the model's own.
    """

    def __init__(self, primary: CausalLM, rank: int, seed: int):
        torch.manual_seed(seed)
        self.model = copy.deepcopy(primary).train().requires_grad_(False)
        _round_frozen(self.model)
        self.model.model.embed_tokens.requires_grad_(True)
        if rank:
            for layer in self.model.model.layers:
                assert isinstance(layer, Layer) and layer.mlp is not None
                for room in (layer.self_attn, layer.mlp):
                    for name, matrix in list(room.named_children()):
                        if name in ADAPTED and isinstance(matrix, nn.Linear):
                            setattr(room, name, Adapted(matrix, rank, primary.config.init_std))

    def loss(self, _name: str, batch: Batch) -> Tensor:
        """Mean loss of p over a batch, 0-dim."""
        state_TD, targets_T = self._run(batch)
        total = state_TD.new_zeros(())
        for rows in _chunks(targets_T):
            total = total - _log_prob_sum(self.model.logits(state_TD[rows]), targets_T[rows])
        return total / (targets_T >= 0).sum()

    def score(self, batch: Batch) -> Scores:
        """The scores of p at every token of a batch."""
        with torch.no_grad(), autocast():
            return _score(self.model.logits, *self._run(batch))

    def _run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        count, length = batch.tokens_BS.shape
        kv = BatchKV(count, length)
        positions_T = torch.arange(length).repeat(count)
        writers = [kv] * len(self.model.model.layers)
        out = self.model.step(batch.tokens_BS.flatten(), positions_T, writers)
        return out.primary_TD, batch.targets_BS.flatten()


class Adapted(nn.Module):
    """A frozen matrix and a LoRA on it, born as ``add_aux`` bears an auxiliary's."""

    def __init__(self, shared: nn.Linear, rank: int, std: float) -> None:
        super().__init__()
        self.shared, self.lora = shared, LoRA(shared, rank)
        nn.init.normal_(self.lora.lora_A.weight, std=std)
        nn.init.zeros_(self.lora.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + self.lora(x)


def _round_frozen(model: CausalLM) -> None:
    """Keep frozen matrices in bfloat16, to which autocast would round them anew at each use, with
    the same result. The head gets a copy of its own: E1 itself is looked up in float32.
    """
    head = model.model.embed_tokens.weight.detach().to(torch.bfloat16)
    model.lm_head.weight = nn.Parameter(head, requires_grad=False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name and not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


def _chunks(targets_T: Tensor) -> tuple[Tensor, ...]:
    """Indices of the rows whose target counts, so many at a time that their logits fit."""
    return (targets_T >= 0).nonzero()[:, 0].split(ROWS)


def _log_prob_sum(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return -F.cross_entropy(logits_TV.float(), targets_T, reduction="sum")


def _score(logits: Callable[[Tensor], Tensor], state_TD: Tensor, targets_T: Tensor) -> Scores:
    parts = [scores_of(logits(state_TD[rows]), targets_T[rows]) for rows in _chunks(targets_T)]
    return joined(parts)
