"""The backbone that every variant shares, and the one step function over primary and auxiliary
rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dualflow.model.balance import RouterSums, router_sums
from dualflow.model.couplings import per_flow, project
from dualflow.model.flows import is_aux, new_embedding, norm_of, owned
from dualflow.model.kv import BatchKV, ContiguousCache, KVWriter, Remembered
from dualflow.model.layer import Layer, LayerOutput, RotaryTable
from dualflow.model.moe import LayerRouting
from dualflow.model.quantise import QUANTISED_TENSORS, QuantisedEmbedding
from dualflow.model.readout import ReadoutLogProbs
from dualflow.model.rows import FanOut, Kept, Rows
from dualflow.ops.mixture import TargetLogProbs, log_softmax, sum_over_chunks
from dualflow.ops.rope import rotary_table
from dualflow.spec import ModelConfig, QuantisedFormat


class AuxRows(NamedTuple):
    """The auxiliary rows of a step, one set for each flow: A tokens at A positions.

    ``pins_A`` names the primary row of this step each is pinned to (None: row i to row i). Where an
    earlier step made the primary rows, ``kept`` holds their intermediates layer by layer, and the
    reader resolves ``pins_A``. ``experts`` says how many experts the rows of a flow go through
    where that is not what the model was trained with, each its own number of [A] where they differ.
    """

    tokens_A: Tensor
    positions_A: Tensor
    pins_A: Tensor | None = None
    kept: Sequence[Kept] | None = None
    experts: FanOut | None = None


class StepOutput(NamedTuple):
    """Final hidden rows, after the last norm.

    ``aux_FAD`` is None where no auxiliary rows were asked for, and has no flows where the variant
    has none; ``kept`` is there where it was asked for; ``routing`` has an item for every layer with
    experts.
    """

    primary_TD: Tensor
    aux_FAD: Tensor | None
    kept: list[Kept] | None = None
    routing: Sequence[LayerRouting] = ()


class LossSums(NamedTuple):
    """Sums over the counted targets, in nats, 0-dim; ``total`` is what training differentiates
    (−log r − λ log p). ``router`` is there where layers have experts: what the balancing losses are
    made of, which ``total`` leaves out.
    """

    total: Tensor
    r: Tensor
    p: Tensor | None
    q: Tensor | None
    count: Tensor
    router: RouterSums | None = None


class Backbone(nn.Module):
    """Embeddings, layers and final norm, under Hugging Face's names; ``aux`` holds what the
    flows own outside layers.
    """

    def __init__(self, config: ModelConfig, *, own_key_value: bool = False) -> None:
        super().__init__()
        self.embed_tokens = new_embedding(config.vocab_size, config.hidden_size)
        learned = config.position == "learned"
        self.embed_positions = (
            new_embedding(config.max_position, config.hidden_size) if learned else None
        )
        self.layers = nn.ModuleList(
            Layer(config, index, own_key_value=own_key_value) for index in range(config.num_layers)
        )
        self.norm = norm_of(config, config.hidden_size)
        self.aux = nn.ModuleList()


class CausalLM(nn.Module):
    """A language model of any variant. Subclasses say what the auxiliary rows start from and how
    r is read out.
    """

    def __init__(self, config: ModelConfig, *, own_key_value: bool = False) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config, own_key_value=own_key_value)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # What ``model.quantise`` made of the matrices; None: they are floats.
        self.quantised: QuantisedFormat | None = None
        self.tie_head()
        self._checkpointing = False

    @property
    def has_primary_readout(self) -> bool:
        """Whether the model can run with the auxiliary off."""
        return self.config.has_primary_readout

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of activations: what the embedding gives."""
        table = self.model.embed_tokens
        return table.dtype if isinstance(table, QuantisedEmbedding) else table.weight.dtype

    def tie_head(self) -> None:
        """Let the head hold the embedding's own tensors, where the two are tied."""
        if self.config.tie_embeddings:
            for name in QUANTISED_TENSORS:
                if hasattr(self.lm_head, name):
                    setattr(self.lm_head, name, getattr(self.model.embed_tokens, name))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CausalLM":
        # Moving a model moves each buffer by itself, and so would part a tied head of buffers.
        super()._apply(fn, recurse)
        self.tie_head()
        return self

    # What a variant defines.

    def embed_aux(self, tokens_A: Tensor) -> Tensor:
        """[flows, A, D]: what the auxiliary rows of these tokens start from."""
        raise ValueError(f"a {self.config.variant} model has no auxiliary rows")

    def target_log_probs(
        self, primary_TD: Tensor, aux_FTD: Tensor, targets_T: Tensor
    ) -> TargetLogProbs:
        """Log-probabilities of the targets; ``aux_FTD`` has no flows where the variant has none."""
        raise NotImplementedError

    def read(self, primary_AD: Tensor, aux_FAD: Tensor) -> ReadoutLogProbs:
        """Whole distributions with the auxiliary on."""
        raise NotImplementedError

    # What all variants share.

    def step(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        kv: Sequence[KVWriter],
        aux_pins_A: Tensor | None = None,
        *,
        aux: AuxRows | None = None,
        keep: bool = False,
        primary_experts: FanOut | None = None,
    ) -> StepOutput:
        """One forward step, whatever the phase: T primary rows and the auxiliary rows of the pinned
        ones.

        tokens_T, positions_T: ids and absolute positions of the primary's rows.
        kv:          one writer per layer; the primary's keys and values go in, and both flows read
                     them.
        aux_pins_A:  rows of this step that get auxiliary rows; or ``aux``: auxiliary rows in full
                     (see ``AuxRows``).
        keep:        also return every primary row's intermediates, for auxiliary rows run later.
        primary_experts: how many experts the primary rows go through; None: as trained.
        """
        if aux is None and aux_pins_A is not None:
            aux = AuxRows(tokens_T[aux_pins_A], positions_T[aux_pins_A], aux_pins_A)
        h_RD, positions_R = self._scaled(self.model.embed_tokens(tokens_T)), positions_T
        num_flows = 0
        if aux is not None and self.config.num_flows:
            num_flows = self.config.num_flows
            aux_FAD = self._scaled(self.embed_aux(aux.tokens_A))
            h_RD = torch.cat([h_RD, aux_FAD.flatten(0, 1)])
            positions_R = torch.cat([positions_T, aux.positions_A.repeat(num_flows)])
        if self.model.embed_positions is not None:
            h_RD = h_RD + self.model.embed_positions(positions_R)
        pins_A, kept = (aux.pins_A, aux.kept) if aux is not None else (None, None)
        aux_experts = aux.experts.repeat(num_flows) if aux is not None and aux.experts else None
        rows = Rows(
            len(tokens_T), num_flows, positions_R, pins_A, kept, primary_experts, aux_experts
        )
        h_RD, made, routing = self._layers(h_RD, rows, kv)
        n_RD = per_flow(h_RD, rows, self.model.norm, owned(self.model.aux, "norm"))
        primary_TD = rows.primary(n_RD)
        aux_FAD = None
        if aux is not None:
            none_FAD = primary_TD.new_empty(0, len(aux.tokens_A), primary_TD.shape[1])
            aux_FAD = rows.aux(n_RD) if num_flows else none_FAD
        return StepOutput(primary_TD, aux_FAD, made if keep else None, routing)

    def _layers(
        self, h_RD: Tensor, rows: Rows, kv: Sequence[KVWriter]
    ) -> tuple[Tensor, list[Kept], list[LayerRouting]]:
        rotary, local_rotary = self._rotary(rows.positions_R, h_RD.dtype)
        made: list[Kept] = []
        routing: list[LayerRouting] = []
        for index, layer in enumerate(self.model.layers):
            turns = rotary if self.config.window_of(index) is None else local_rotary
            inputs = (h_RD, rows, kv[index], turns, rows.kept[index] if rows.kept else None)
            if self._checkpointing and self.training and torch.is_grad_enabled():
                out: LayerOutput = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                out = layer(*inputs)
            h_RD = out.state_RD
            made.append(out.kept)
            if out.routing is not None:
                routing.append(out.routing)
        return h_RD, made, routing

    def _rotary(
        self, positions_R: Tensor, activations: torch.dtype
    ) -> tuple[RotaryTable | None, RotaryTable | None]:
        """The rows' turns in a layer that sees everything, and in one that slides."""
        c = self.config
        if c.position != "rotary":
            return None, None
        wide_R = positions_R.to(torch.float64 if activations == torch.float64 else torch.float32)
        table = rotary_table(wide_R, c.head_size, c.rope_theta, c.rope_scaling)
        if c.local_rope_theta is None:
            return table, table
        return table, rotary_table(wide_R, c.head_size, c.local_rope_theta)

    def _scaled(self, embedded: Tensor) -> Tensor:
        """Token embeddings as the first layer takes them."""
        if not self.config.scale_embeddings:
            return embedded
        # Rounded to the activations' format, as the models were trained.
        return embedded * embedded.new_tensor(self.config.hidden_size**0.5)

    def loss(
        self, tokens_BS: Tensor, targets_BS: Tensor, document_ids_BS: Tensor | None = None
    ) -> LossSums:
        """Loss of every counted target (ids below 0 are not counted), auxiliary rows at every
        token.

        ``document_ids_BS``, where given, keeps attention inside each document.
        """
        batch, length = tokens_BS.shape
        positions_T = torch.arange(length, device=tokens_BS.device).repeat(batch)
        kv = BatchKV(batch, length, document_ids_BS)
        tokens_T, targets_T = tokens_BS.flatten(), targets_BS.flatten()
        out = self._whole_step(tokens_T, positions_T, kv)
        assert out.aux_FAD is not None
        sums = sum_over_chunks(
            self.target_log_probs, out.primary_TD, out.aux_FAD, targets_T, self.config.vocab_size
        )
        weight = self.config.readout.primary_loss_weight
        total = sums.r if sums.p is None or not weight else sums.r + weight * sums.p
        router = router_sums(out.routing, self.config)
        return LossSums(total, sums.r, sums.p, sums.q, (targets_T >= 0).sum(), router)

    def _whole_step(self, tokens_T: Tensor, positions_T: Tensor, kv: BatchKV) -> StepOutput:
        """Auxiliary rows at every token. A frozen primary runs before them, in a step of its own
        that keeps nothing for a backward pass but what the auxiliary reads.
        """
        aux = AuxRows(tokens_T, positions_T)
        if not (self.primary_frozen and self.config.num_flows):
            return self.step(tokens_T, positions_T, [kv] * self.config.num_layers, aux=aux)
        writers = [Remembered(kv) for _ in range(self.config.num_layers)]
        with torch.no_grad():
            primary = self.step(tokens_T, positions_T, writers, keep=True)
        out = self.step(tokens_T[:0], positions_T[:0], writers, aux=aux._replace(kept=primary.kept))
        routing = [
            LayerRouting.joined(*both) for both in zip(primary.routing, out.routing, strict=True)
        ]
        return StepOutput(primary.primary_TD, out.aux_FAD, routing=routing)

    @property
    def primary_frozen(self) -> bool:
        """Whether nothing of the primary is trained."""
        named = self.named_parameters()
        return not any(p.requires_grad for name, p in named if not is_aux(name))

    def freeze_primary(self) -> None:
        """Train the auxiliary flows alone: no gradient is computed or kept for anything else.

        Raises ``ValueError`` where the model has none.
        """
        if not any(is_aux(name) for name, _ in self.named_parameters()):
            raise ValueError(
                f"this {self.config.variant} model has no auxiliary flow to train beside a frozen "
                "primary; give it one with `dualflow retrofit`"
            )
        for name, parameter in self.named_parameters():
            if not is_aux(name):
                parameter.requires_grad_(False)

    def logits(self, state_TD: Tensor) -> Tensor:
        """[T, V]: the primary's head over final states."""
        return self._capped(self.lm_head(state_TD))

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.final_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def log_probs(self, primary_AD: Tensor, aux_FAD: Tensor | None) -> ReadoutLogProbs:
        """r, p and q over the vocabulary for A rows, in float32 (float64 for float64 models).

        ``aux_FAD`` None reads the primary alone: r is p. Ids of padded vocabulary rows have log r
        of −inf.
        """
        if aux_FAD is None:
            self.require_primary_readout()
            log_p = log_softmax(self.logits(primary_AD))
            out = ReadoutLogProbs(log_p, log_p, None)
        else:
            out = self.read(primary_AD, aux_FAD)
        if self.config.num_real_tokens == self.config.vocab_size:
            return out
        ids = torch.arange(self.config.vocab_size, device=out.r.device)
        real = ids < self.config.num_real_tokens
        return out._replace(r=out.r.masked_fill(~real, -torch.inf).log_softmax(-1))

    def require_primary_readout(self) -> None:
        """Raise ``ValueError`` where the model cannot run with the auxiliary off."""
        if not self.has_primary_readout:
            raise ValueError(
                f"this {self.config.variant} model was trained to be read from its auxiliary rows "
                "only (there is no trained p); run it with --aux on"
            )

    def new_cache(self, max_length: int) -> ContiguousCache:
        """An empty KV cache for one sequence of at most ``max_length`` tokens."""
        c = self.config
        return ContiguousCache(
            c.num_layers,
            c.kv_heads,
            c.head_size,
            max_length,
            device=self.device,
            dtype=self.dtype,
        )

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute each layer's activations in the backward pass instead of keeping them."""
        self._checkpointing = enabled

    def aux_logits(self, aux_FTD: Tensor) -> Tensor:
        """[flows, T, V]: the shared head over the auxiliary rows, or each flow's own where it
        owns one.
        """
        rows = Rows(0, len(aux_FTD), aux_FTD.new_empty(0))
        heads = owned(self.model.aux, "lm_head")
        return self._capped(rows.aux(project(aux_FTD.flatten(0, 1), rows, self.lm_head, heads)))
