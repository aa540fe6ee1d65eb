"""Time of prefill and of decoding at batch 1, through the model's one step function.

What is timed is what generation does for each token: one step (with the auxiliary rows of the last
position, where the model has them), the readout r over the vocabulary, and the choice of the most
likely id. The ids fed are made up and the same for both models.
"""

from functools import partial

import torch

from dualflow.bench.measurement import Measurement
from dualflow.bench.pairs import ModelPair, made_up_tokens
from dualflow.bench.timing import SILENT, Watcher, paired, seconds_of
from dualflow.model import CausalLM, ContiguousCache
from dualflow.plan.costs import decode_flops, decode_flops_per_token, prefill_flops_per_token

MILLISECONDS = 1e3


def measure_decode(
    pair: ModelPair,
    *,
    precision: str,
    prompt_tokens: int,
    new_tokens: int,
    repetitions: int,
    watcher: Watcher = SILENT,
) -> Measurement:
    """Milliseconds per token, over ``new_tokens`` tokens after a prompt, afresh every time.

    The counted ratio is that of FLOPs. The bytes read, which bound decoding where weights come from
    memory, are the same for both but for the coupling vectors.
    """
    pair.cast(precision)
    case = f"{pair.name}, {new_tokens} tokens after {prompt_tokens}"
    samples = paired(
        partial(_decode, pair.standard, prompt_tokens, new_tokens),
        partial(_decode, pair.dual, prompt_tokens, new_tokens),
        repetitions,
        what=f"decode: {case}, {precision}",
        watcher=watcher,
    )
    context = prompt_tokens + (new_tokens + 1) // 2
    standard, dual = (decode_flops_per_token(model.config, context) for model in _both(pair))
    return Measurement(
        benchmark="decode",
        case=case,
        model=pair.name,
        precision=precision,
        compiled=False,
        unit="ms/token",
        samples=samples.scaled(MILLISECONDS / new_tokens),
        counted_ratio=dual / standard,
    )


def measure_prefill(
    pair: ModelPair,
    *,
    precision: str,
    prompt_tokens: int,
    repetitions: int,
    watcher: Watcher = SILENT,
) -> Measurement:
    """Milliseconds from the prompt to the first new token.

    The counted ratio is a little above 1: it holds the dual model's auxiliary row of the last
    position, which prefill runs and which costs are otherwise counted with the first new token.
    """
    pair.cast(precision)
    case = f"{pair.name}, {prompt_tokens} tokens"
    samples = paired(
        partial(_prefill, pair.standard, prompt_tokens),
        partial(_prefill, pair.dual, prompt_tokens),
        repetitions,
        what=f"prefill: {case}, {precision}",
        watcher=watcher,
    )
    standard, dual = (
        prompt_tokens * prefill_flops_per_token(model.config, prompt_tokens)
        + decode_flops(model.config, prompt_tokens).aux.total
        for model in _both(pair)
    )
    return Measurement(
        benchmark="prefill",
        case=case,
        model=pair.name,
        precision=precision,
        compiled=False,
        unit="ms",
        samples=samples.scaled(MILLISECONDS),
        counted_ratio=dual / standard,
    )


def _both(pair: ModelPair) -> tuple[CausalLM, CausalLM]:
    return pair.standard, pair.dual


def _prefill(model: CausalLM, prompt_tokens: int) -> float:
    tokens_T = made_up_tokens(model.config, prompt_tokens)
    cache = model.new_cache(prompt_tokens)
    return seconds_of(partial(_advance, model, cache, tokens_T))


def _decode(model: CausalLM, prompt_tokens: int, new_tokens: int) -> float:
    """Seconds of all new tokens; the prompt is run before and not counted."""
    tokens_T = made_up_tokens(model.config, prompt_tokens + new_tokens)
    cache = model.new_cache(len(tokens_T))
    _advance(model, cache, tokens_T[:prompt_tokens])
    steps = tokens_T[prompt_tokens:].split(1)

    def work() -> None:
        for token_T in steps:
            _advance(model, cache, token_T)

    return seconds_of(work)


@torch.inference_mode()
def _advance(model: CausalLM, cache: ContiguousCache, tokens_T: torch.Tensor) -> int:
    """Append the tokens; returns the most likely next id."""
    positions_T = torch.arange(cache.length, cache.length + len(tokens_T))
    pins_A = torch.tensor([len(tokens_T) - 1])
    out = model.step(tokens_T, positions_T, cache.writers(), pins_A)
    return int(model.log_probs(out.primary_TD[-1:], out.aux_FAD).r[0].argmax())
