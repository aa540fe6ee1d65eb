"""A quantised model is the float model whose matrices hold the dequantised weights, and takes the
bytes that the formula says.
"""

import copy
from itertools import islice

import pytest
import torch

from dualflow.checkpoint.strict import is_aux, stored_tensors
from dualflow.model import CausalLM, quantise_model
from dualflow.model.generate import FinishEvent, GenerationParams, TokenEvent, generate
from dualflow.model.quantise import quantised_matrices
from dualflow.model.sampling import SamplingParams
from dualflow.plan import WeightFormat, weight_bytes
from dualflow.spec import ModelConfig, QuantisedFormat
from dualflow.testing.steps import WITHOUT_EXPERTS, whole_sequence
from dualflow.testing.tensors import random_tokens, same, tiny_model

KINDS: tuple[QuantisedFormat, ...] = ("int8", "int4")
configs = pytest.mark.parametrize("config", WITHOUT_EXPERTS.values(), ids=WITHOUT_EXPERTS)
kinds = pytest.mark.parametrize("kind", KINDS)


def pair(config: ModelConfig, kind: QuantisedFormat) -> tuple[CausalLM, CausalLM]:
    """A quantised model, and its float twin."""
    model = tiny_model(config)
    quantised = quantise_model(copy.deepcopy(model), kind)
    with torch.no_grad():
        for name, matrix in quantised_matrices(quantised).items():
            model.get_parameter(f"{name}.weight").copy_(matrix.dequantised(torch.float64))
    return quantised, model.eval()


@configs
@kinds
def test_every_distribution_is_that_of_the_dequantised_model(
    config: ModelConfig, kind: QuantisedFormat
):
    quantised, floats = pair(config, kind)
    tokens = random_tokens(config, 11)
    with torch.inference_mode():
        found, expected = (
            model.log_probs(out.primary_TD, out.aux_FAD)
            for model in (quantised, floats)
            for out in [whole_sequence(model, tokens)]
        )
    for one, other in zip(found, expected, strict=True):
        assert same(one, other)


@configs
@kinds
def test_it_generates_what_the_dequantised_model_generates(
    config: ModelConfig, kind: QuantisedFormat
):
    prompt = random_tokens(config, 5).tolist()
    params = GenerationParams(max_tokens=6, sampling=SamplingParams(temperature=0))
    texts = []
    for model in pair(config, kind):
        events = list(generate(model, prompt, params))
        assert isinstance(events[-1], FinishEvent)
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        texts.append([(event.token_id, event.log_r) for event in islice(tokens, 6)])
    assert len(texts[0]) == 6
    assert texts[0] == texts[1]


@configs
@pytest.mark.parametrize("weights", ["float64", "float32", "bfloat16", "int8", "int4"])
def test_it_takes_the_bytes_that_are_predicted(config: ModelConfig, weights: WeightFormat):
    if weights == "int8" or weights == "int4":
        model = quantise_model(tiny_model(config, dtype=torch.float32), weights)
    else:
        model = tiny_model(config, dtype=getattr(torch, weights))
    found = {True: 0, False: 0}
    for name, tensor in stored_tensors(model).items():
        found[is_aux(name)] += tensor.nbytes
    predicted = weight_bytes(config, weights)
    assert (predicted.primary, predicted.aux) == (found[False], found[True])
