"""An auxiliary flow that changes nothing at birth."""

import pytest
import torch

from dualflow.checkpoint.retrofit import add_aux
from dualflow.model import BatchKV, CausalLM, quantise_model
from dualflow.spec import AuxConfig, ReadoutConfig
from dualflow.testing import FAMILIES, family_config, tiny_config
from dualflow.testing.tensors import random_tokens, same, tiny_model


@torch.no_grad()
def distributions(model: CausalLM, tokens_T: torch.Tensor):
    rows = torch.arange(len(tokens_T))
    kv = [BatchKV(1, len(tokens_T))] * model.config.num_layers
    out = model.step(tokens_T, rows, kv, rows)
    return model.log_probs(out.primary_TD, out.aux_FAD)


@pytest.mark.parametrize("family", FAMILIES)
def test_r_and_q_are_p_and_p_is_the_source(family):
    model = tiny_model(family_config(family))
    dual = add_aux(model)
    tokens = random_tokens(model.config, 20)
    before, after = distributions(model, tokens), distributions(dual, tokens)
    assert after.p is not None
    assert after.q is not None
    torch.testing.assert_close(after.p, before.r if before.p is None else before.p)
    torch.testing.assert_close(after.q, after.p)
    torch.testing.assert_close(after.r.exp(), before.r.exp(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "aux",
    [
        AuxConfig(num_flows=2, couplings=("query",)),
        AuxConfig(embedding="tied"),
        AuxConfig(flow_norms="separate", owns=("q_proj", "o_proj", "mlp", "lm_head")),
        AuxConfig(owns=("q_proj", "o_proj", "mlp", "lm_head"), lora_rank=2),
    ],
    ids=["flows", "tied", "owns", "lora"],
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_whatever_the_flow_owns_starts_as_the_primary(family, aux):
    model = tiny_model(family_config(family))
    dual = add_aux(model, aux)
    out = distributions(dual, random_tokens(model.config, 12))
    assert out.q is not None
    assert out.p is not None
    torch.testing.assert_close(out.q, out.p)


def test_the_primary_is_the_source_bit_for_bit_and_shares_no_memory():
    model = tiny_model(tiny_config(), dtype=torch.float32)
    model.model.norm.double()  # formats may be mixed
    dual = add_aux(model)
    for name, tensor in model.state_dict().items():
        assert same(dual.state_dict()[name], tensor), name
        assert dual.state_dict()[name].data_ptr() != tensor.data_ptr(), name
    assert all(not p.any() for n, p in dual.named_parameters() if n.endswith("_coupling"))


def test_a_tied_head_stays_tied():
    dual = add_aux(tiny_model(tiny_config(tie_embeddings=True)))
    assert dual.lm_head.weight is dual.model.embed_tokens.weight


def test_mode_and_readout_are_kept():
    model = tiny_model(tiny_config()).eval()
    dual = add_aux(model, readout=ReadoutConfig(kind="aux_only"))
    assert not dual.training
    assert dual.config.readout.kind == "aux_only"


@pytest.mark.parametrize("variant", ["dual", "phd2", "two_softmax"])
def test_other_variants_are_refused(variant):
    with pytest.raises(ValueError, match=f"is a {variant} model already"):
        add_aux(tiny_model(tiny_config(variant)))


def test_quantised_models_are_refused():
    model = quantise_model(tiny_model(tiny_config(), dtype=torch.float32), "int8")
    with pytest.raises(ValueError, match="matrices are int8"):
        add_aux(model)
