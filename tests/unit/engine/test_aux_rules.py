"""When a position needs the auxiliary, and that skipping it is safe."""

from typing import Any

import numpy as np
import pytest

from dualflow.engine.aux_rules import SURELY_SHARP, AuxRule, aux_rule, greedy_is_sure
from dualflow.engine.request import AuxPolicy, RequestError, RequestParams, StructuredOutput
from dualflow.spec import ModelConfig, ReadoutConfig
from dualflow.testing import tiny_config
from dualflow.testing.configs import flow_config

DUAL, EXACT = tiny_config("dual"), AuxPolicy("exact")


def rule(config: ModelConfig = DUAL, **params: Any) -> AuxRule:
    return aux_rule(RequestParams(**params), config)


@pytest.mark.parametrize(
    ("params", "need"),
    [
        ({}, "always"),
        ({"aux": AuxPolicy("off")}, "never"),
        ({"aux": EXACT}, "two_stage"),
        ({"aux": EXACT, "temperature": 0.0}, "greedy"),
        ({"aux": EXACT, "temperature": 0.0, "allowed_ids": frozenset({3})}, "greedy"),
        ({"aux": EXACT, "temperature": 0.0, "structured": StructuredOutput("json")}, "greedy"),
        ({"aux": EXACT, "temperature": 0.0, "presence_penalty": 0.1}, "always"),
        ({"aux": EXACT, "temperature": 0.0, "logit_bias": {3: 1.0}}, "always"),
        ({"aux": EXACT, "temperature": 0.0, "logprobs": 0}, "always"),
        ({"aux": EXACT, "logprobs": 0}, "always"),
        ({"aux": EXACT, "temperature": 0.9}, "always"),
        ({"aux": EXACT, "top_k": 5}, "always"),
        ({"aux": EXACT, "allowed_ids": frozenset({3})}, "always"),
        ({"aux": EXACT, "drafts": "ngram"}, "two_stage"),
        ({"aux": EXACT, "drafts": "primary"}, "always"),
        ({"aux": EXACT, "drafts": "primary", "temperature": 0.0}, "greedy"),
        ({"aux": AuxPolicy("threshold", 0.9), "logprobs": 3}, "threshold"),
    ],
    ids=str,
)
def test_the_policys_table(params: dict[str, Any], need: str) -> None:
    assert rule(**params).need == need
    assert rule(tiny_config("two_softmax"), **params).need == need
    assert rule(tiny_config("standard"), **params).need == "never"


def test_a_readout_that_is_no_mixture_always_needs_it() -> None:
    config = tiny_config("dual", readout=ReadoutConfig(kind="aux_only"))
    for aux in (EXACT, AuxPolicy("threshold", 0.5)):
        assert rule(config, aux=aux).need == rule(tiny_config("phd2"), aux=aux).need == "always"
    with pytest.raises(RequestError, match="no trained p"):
        rule(config, aux=AuxPolicy("off"))
    with pytest.raises(RequestError, match="drafts = 'primary'"):
        rule(config, drafts="primary")


def test_a_primary_that_stands_alone_may_be_read_alone() -> None:
    config = flow_config("standalone_primary")
    assert rule(config, aux=AuxPolicy("off")).need == "never"
    assert rule(config, aux=AuxPolicy("on")).need == "always"


def test_the_threshold_comes_along_and_only_sampling_is_coupled() -> None:
    assert rule(aux=AuxPolicy("threshold", 0.7)).threshold == 0.7
    assert rule(drafts="primary").coupled
    assert not rule(drafts="primary", temperature=0.0).coupled
    assert not rule(drafts="ngram").coupled


def test_where_greedy_is_sure_no_q_changes_the_token() -> None:
    draw = np.random.default_rng(0)
    sure = 0
    for _ in range(2000):
        p = draw.dirichlet(np.full(6, 0.1))
        alpha = float(np.clip((p**2).sum(), 0.5, 1))
        second, first = np.sort(p)[-2:]
        if alpha > SURELY_SHARP + 1e-5:
            assert greedy_is_sure(alpha, first, second)
        if greedy_is_sure(alpha, first, second):
            sure += 1
            for worst in np.eye(6):
                assert (alpha * p + (1 - alpha) * worst).argmax() == p.argmax()
    assert 500 < sure < 1900
    assert not greedy_is_sure(float("nan"), 0.9, 0.1)
