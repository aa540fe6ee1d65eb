"""The Dual-Flow Transformer for the `transformers` library.

The primary flow is a complete causal language model with distribution p and processes the prompt
alone; from the last prompt position on, auxiliary flows with distribution q read its cache. What is
trained and sampled is r, a mixture of both. ``logits`` are log r, so that a softmax, a sampler or a
beam search over them works on r. The layer is in ``layer_dualflow``; shapes are explained there.
"""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .attention_dualflow import Positions, wide
from .backbone_dualflow import CACHE, DualFlowAlpha, DualFlowModel, DualFlowPreTrainedModel
from .configuration_dualflow import DualFlowConfig
from .layer_dualflow import own, project

logger = logging.get_logger(__name__)

AuxMode = Literal["on", "off"]

IGNORED = -100
"""The label of a position that is not counted."""

_LOGITS_PER_CHUNK = 2**22
"""Logits of one flow that exist at a time while a loss is computed."""


class DualFlowForCausalLM(DualFlowPreTrainedModel, GenerationMixin):
    """A causal language model read out as r."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DualFlowConfig) -> None:
        super().__init__(config)
        self.vocab_size = config.vocab_size
        self.model = DualFlowModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        learned = config.num_flows and config.config["readout"]["kind"] == "learned"
        self.aux_readout = DualFlowAlpha() if learned else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        aux: AuxMode | None = None,
        cache: Cache | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Log r [B, A, V] in at least float32, and the loss where there are labels.

        labels:          [B, S]; position t is scored on the label at t + 1, −100 is not counted.
                         A keyword ``shift_labels`` has them shifted already.
        logits_to_keep:  how many last positions (0: all) or which positions are read out. The
                         auxiliary flows run there, and wherever there is a label. None: all, but
                         none in training, where the loss alone is computed, in chunks.
        aux:             ``off`` reads p alone; None: as the configuration's ``aux_mode`` says.
        num_items_in_batch: what the loss is divided by instead of the number of counted labels.

        The other arguments are ``DualFlowModel.forward``'s. The loss is the mean of −log r, and of
        −λ log p with it where the configuration has a ``primary_loss_weight`` λ.
        """
        if output_attentions:
            raise ValueError("output_attentions is not supported: attention keeps no weights")
        # No parameter: the Trainer takes each that is called so for a column that must be there.
        shift_labels: Tensor | None = kwargs.get("shift_labels")
        if labels is not None and shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        at, read_at = self._positions(logits_to_keep, shift_labels is not None)
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache,
            aux_at=at if self._runs_aux(aux) else None, cache=cache,
            output_hidden_states=output_hidden_states, return_dict=True,
        )  # fmt: skip
        self._warn_of_right_padding(attention_mask, logits_to_keep)
        h1, h2 = out.last_hidden_state[:, at], out.aux_hidden_state
        loss = logits = None
        if shift_labels is not None:
            loss = self._loss(h1, h2, shift_labels.to(h1.device), num_items_in_batch)
        if read_at is not None:
            h2 = None if h2 is None else h2[:, :, read_at]
            logits = self._real(self._log_r(*self._log_p_q(h1[:, read_at], h2)))
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=out.hidden_states,  # type: ignore[arg-type]
            **{CACHE: getattr(out, CACHE)},
        )  # fmt: skip

    def _positions(
        self, keep: int | Tensor | None, scored: bool
    ) -> tuple[Positions, Positions | None]:
        """Where the auxiliary runs, and which of these positions are read out (None: none)."""
        chosen: Positions = slice(None)
        if isinstance(keep, Tensor):
            chosen = keep
        elif keep:
            chosen = slice(-keep, None)
        if not scored:
            return chosen, slice(None)
        return slice(None), None if keep is None and self.training else chosen

    def _runs_aux(self, aux: AuxMode | None) -> bool:
        mode = self.config.aux_mode if aux is None else aux
        if mode not in ("on", "off"):
            raise ValueError(f"aux is {mode!r}; expected 'on' or 'off'")
        if mode == "off" and self.config.num_flows and not self.config.has_primary_readout:
            raise ValueError(
                "this model was trained to be read from its auxiliary rows only (there is no "
                "trained p); run it with aux='on'"
            )
        return mode == "on" and self.config.num_flows > 0

    @property
    def _readout(self) -> dict[str, Any]:
        return self.config.config["readout"]

    def _log_p_q(self, h1: Tensor, h2: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Log p and log q of final states, [..., V] each; q is the flows' mean in probability."""
        none = h1.new_empty(0, *h1.shape)
        heads = own(self.model.aux, "lm_head")
        logits1, logits2 = project(self.lm_head, heads, h1, none if h2 is None else h2)
        cap = self.config.config["final_softcap"]
        if cap is not None:
            logits1, logits2 = (cap * (x / cap).tanh() for x in (logits1, logits2))
        log_p = logits1.log_softmax(-1, dtype=wide(logits1.dtype))
        if h2 is None:
            return log_p, None
        log_q = logits2.log_softmax(-1, dtype=wide(logits2.dtype))
        if len(log_q) == 1:
            return log_p, log_q[0]
        return log_p, log_q.logsumexp(0) - torch.log(log_q.new_tensor(float(len(log_q))))

    def _log_r(self, log_p: Tensor, log_q: Tensor | None, targets: Tensor | None = None) -> Tensor:
        """Log r [..., V], or [...] at ``targets`` [...]: r = αp + (1 − α)q with α as
        ``configuration_dualflow`` says, 1 − α not taken by subtraction.
        """
        kind, alpha = self._readout["kind"], None
        if log_q is not None and kind in ("mixture", "learned"):
            grad = self._readout["alpha_gradient"]
            alpha = self._log_alpha(*((log_p, log_q) if grad else (log_p.detach(), log_q.detach())))
        if targets is not None:
            log_p = log_p.gather(-1, targets[..., None])
            log_q = None if log_q is None else log_q.gather(-1, targets[..., None])
        log_r = log_p
        if alpha is not None and log_q is not None:
            log_r = torch.logaddexp(alpha[0] + log_p, alpha[1] + log_q)
        elif log_q is not None and kind == "aux_only":
            log_r = log_q
        return log_r if targets is None else log_r[..., 0]

    def _log_alpha(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Log α and log(1 − α), [..., 1]."""
        sum_p, rest_p = _collision(log_p)
        if self.aux_readout is None:
            tiny = torch.finfo(log_p.dtype).tiny
            return sum_p.clamp(0.5, 1.0).log(), rest_p.clamp(tiny, 0.5).log()
        w = self.aux_readout.weight.to(log_p.dtype)
        tiny = torch.finfo(log_p.dtype).tiny
        sums = (_collision(log_p), _collision(log_q))
        odds_p, odds_q = (s.clamp_min(tiny).log() - rest.clamp_min(tiny).log() for s, rest in sums)
        odds = w[0] + w[1] * odds_p + w[2] * odds_q
        return F.logsigmoid(odds), F.logsigmoid(-odds)

    def _real(self, log_r: Tensor) -> Tensor:
        """Padded rows of the vocabulary get −∞, the others the whole probability."""
        real = self.config.config["real_vocab_size"]
        if real is None or real == self.config.vocab_size:
            return log_r
        padded = torch.arange(self.config.vocab_size, device=log_r.device) >= real
        return log_r.masked_fill(padded, -torch.inf).log_softmax(-1)

    def _loss(
        self, h1: Tensor, h2: Tensor | None, targets: Tensor, count: Tensor | int | None
    ) -> Tensor:
        """Mean loss of the counted targets. Logits exist for a chunk of rows at a time, and are
        computed again in the backward pass.
        """
        counted = targets != IGNORED
        targets = targets[counted]
        rows1, rows2 = h1[counted], None if h2 is None else h2[:, counted]
        size = max(1, _LOGITS_PER_CHUNK // self.config.vocab_size)
        total = rows1.new_zeros((), dtype=wide(rows1.dtype))
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            inputs = (rows1[part], None if rows2 is None else rows2[:, part], targets[part])
            if len(targets) <= size:
                total = total + self._sum_of_losses(*inputs)
            else:
                total = total + checkpoint(self._sum_of_losses, *inputs, use_reentrant=False)
        if count is None:
            return total / max(1, len(targets))
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    def _sum_of_losses(self, h1: Tensor, h2: Tensor | None, targets: Tensor) -> Tensor:
        log_p, log_q = self._log_p_q(h1, h2)
        total = -self._log_r(log_p, log_q, targets).sum()
        weight = self._readout["primary_loss_weight"]
        if h2 is not None and weight:
            total = total - weight * log_p.gather(-1, targets[:, None]).sum()
        return total

    def _warn_of_right_padding(self, mask: Tensor | None, keep: int | Tensor | None) -> None:
        prefill = isinstance(keep, int) and keep == 1 and mask is not None and mask.shape[-1] > 1
        if prefill and not mask[:, -1].all():  # type: ignore[index]
            logger.warning_once(
                "some rows end in padding, and what follows is predicted from that; pad on the "
                "left to generate (tokenizer.padding_side = 'left')"
            )

    # What generation asks for.

    def create_masks_for_generate(
        self, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Masks are made in the forward pass, for static caches too."""
        return attention_mask

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        # Lengths are read from the cache as numbers, which a compiled step could not do.
        return False

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Refused where it would change anything: every flow has a table of these ids."""
        if new_num_tokens in (None, self.config.vocab_size):
            return self.get_input_embeddings()
        raise ValueError(
            f"the vocabulary has {self.config.vocab_size:,} rows and cannot be made "
            f"{new_num_tokens:,}; resize the primary and retrofit it again"
        )


def _collision(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Σp² and 1 − Σp² = Σp(1 − p), over the last axis, which stays as 1."""
    p = log_p.exp()
    return p.square().sum(-1, keepdim=True), (p * (1 - p)).sum(-1, keepdim=True)
