"""`generate()` on dual-flow models: our naive generator's tokens, caches of every kind, batches
with padding, and which rows run through which matrix.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dualflow.model import CausalLM, build_model
from dualflow.model.flows import is_aux
from dualflow.model.generate import GenerationParams, TokenEvent, generate
from dualflow.model.sampling import SamplingParams
from dualflow.spec import ModelConfig, standard_twin
from dualflow.testing.configs import family_config, flow_config
from dualflow.testing.tensors import random_tokens, tiny_model

pytest.importorskip("transformers")

from dualflow.integrations.transformers.backbone_dualflow import CACHE
from dualflow.testing.twins import log_r_of, twin_of

CASES: dict[str, ModelConfig] = {
    "llama": family_config("llama", "dual"),
    "gpt2": family_config("gpt2", "dual"),
    "mistral": family_config("mistral", "dual"),
    "gemma2": family_config("gemma2", "dual"),
    "gemma3": family_config("gemma3", "dual"),
    "olmo2": family_config("olmo2", "dual"),
    "padded_vocabulary": family_config("padded_vocabulary", "dual"),
    "standard": family_config("llama"),
    "three_flows": flow_config("three_flows"),
    "lora": flow_config("lora"),
    "learned_alpha": flow_config("learned_alpha"),
}

EOS = 7


def ours(model: CausalLM, prompt: Tensor, count: int, aux: Any = "on") -> list[int]:
    greedy = SamplingParams(temperature=0.0)
    params = GenerationParams(max_tokens=count, sampling=greedy, aux=aux)
    events = generate(model, prompt.tolist(), params)
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def theirs(model: Any, ids: Tensor, count: int, **options: Any) -> Tensor:
    """The new tokens of each row."""
    options = {"do_sample": False, "pad_token_id": EOS, "eos_token_id": None} | options
    out = model.generate(ids, max_new_tokens=count, **options)
    return out[:, ids.shape[1] :]


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    rows = [torch.cat([torch.full((width - len(p),), EOS), p]) for p in prompts]
    mask = [torch.cat([torch.zeros(width - len(p)), torch.ones(len(p))]) for p in prompts]
    return torch.stack(rows), torch.stack(mask).long()


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_our_generator(case: str) -> None:
    native = tiny_model(CASES[case]).eval()
    twin, prompt = twin_of(native), random_tokens(native.config, 9)
    expected = ours(native, prompt, 12)
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        assert theirs(twin, prompt[None], 12, **options)[0].tolist() == expected, options


def test_the_auxiliary_can_be_left_out() -> None:
    native = tiny_model(CASES["llama"]).eval()
    twin, prompt = twin_of(native), random_tokens(native.config, 9)
    expected = ours(native, prompt, 20, aux="off")
    assert expected != ours(native, prompt, 20)
    assert theirs(twin, prompt[None], 20, aux="off")[0].tolist() == expected
    twin.config.aux_mode = "off"
    assert theirs(twin, prompt[None], 20)[0].tolist() == expected


LEFT_OUT: dict[str, ModelConfig] = {
    "lora": CASES["lora"],
    "owned_matrices": flow_config("owns_everything"),
    "two_flows_with_own_norms": flow_config("two_flows_own_mlp"),
    "three_flows": CASES["three_flows"],
    "norms_of_queries": family_config("qwen3", "dual", aux=flow_config("separate_norms").aux),
}


def primary_of(native: CausalLM) -> CausalLM:
    """The standard model that has the primary's tensors."""
    primary = build_model(standard_twin(native.config)).to(native.dtype)
    tensors = {name: t for name, t in native.state_dict().items() if not is_aux(name)}
    primary.load_state_dict(tensors, strict=True)
    return primary.eval()


@pytest.mark.parametrize("case", LEFT_OUT)
def test_whatever_the_flows_own_is_left_out_with_them(case: str) -> None:
    native = tiny_model(LEFT_OUT[case]).eval()
    primary = primary_of(native)
    twin, prompt = twin_of(native), random_tokens(native.config, 9)
    expected = ours(native, prompt, 20, aux="off")
    assert expected == ours(primary, prompt, 20)
    assert expected != ours(native, prompt, 20)
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        got = theirs(twin, prompt[None], 20, aux="off", **options)
        assert got[0].tolist() == expected, options
    standard = twin_of(primary)
    out = twin(prompt[None], labels=prompt[None], aux="off")  # with gradients
    alone = standard(prompt[None], labels=prompt[None])
    torch.testing.assert_close(out.logits, alone.logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.loss, alone.loss, rtol=0, atol=1e-12)


def test_a_model_without_a_trained_p_needs_its_auxiliary() -> None:
    twin = twin_of(tiny_model(flow_config("coupling")))
    with pytest.raises(ValueError, match="there is no trained p"):
        twin(torch.tensor([[1, 2]]), aux="off")
    with pytest.raises(ValueError, match="expected 'on' or 'off'"):
        twin(torch.tensor([[1, 2]]), aux="maybe")


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2", "gemma3", "three_flows"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padded_rows_equal_their_unpadded_runs(case: str, cache: str) -> None:
    native = tiny_model(CASES[case]).eval()
    twin = twin_of(native)
    prompts = [random_tokens(native.config, length, seed=length) for length in (3, 9, 20)]
    ids, mask = left_padded(prompts)
    got = theirs(twin, ids, 7, attention_mask=mask, cache_implementation=cache)
    assert got.tolist() == [ours(native, prompt, 7) for prompt in prompts]


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma3"])
def test_a_padded_forward_pass_gives_each_row_its_own_distributions(case: str) -> None:
    native = tiny_model(CASES[case]).eval()
    twin = twin_of(native)
    prompts = [random_tokens(native.config, length, seed=length) for length in (3, 9, 20)]
    ids, mask = left_padded(prompts)
    right = torch.stack([torch.cat([p, p.new_full((20 - len(p),), EOS)]) for p in prompts])
    with torch.inference_mode():
        on_the_left = twin(ids, attention_mask=mask).logits
        on_the_right = twin(right, attention_mask=mask.flip(1)).logits
        unmasked = twin(prompts[2][None], attention_mask=torch.ones(1, 20)).logits
    for row, prompt in enumerate(prompts):
        expected = log_r_of(native, prompt[None])[0]
        torch.testing.assert_close(on_the_left[row, -len(prompt) :], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(on_the_right[row, : len(prompt)], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(unmasked[0], on_the_left[2], rtol=0, atol=1e-10)
    assert on_the_left.isfinite().all()


def test_right_padding_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    from transformers.utils import logging

    logging.enable_propagation()
    twin = twin_of(tiny_model(CASES["llama"]))
    ids = torch.tensor([[1, 2, EOS], [1, 2, 3]])
    theirs(twin, ids, 2, attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]))
    logging.disable_propagation()
    assert "pad on the left" in caplog.text


def test_a_prompt_runs_through_the_primary_alone() -> None:
    twin = twin_of(tiny_model(CASES["llama"]))
    rows: dict[str, list[int]] = {"q_proj": [], "k_proj": [], "down_proj": [], "lm_head": []}
    layer = twin.model.layers[1]
    modules = {
        "q_proj": layer.self_attn.q_proj, "k_proj": layer.self_attn.k_proj,
        "down_proj": layer.mlp.down_proj, "lm_head": twin.lm_head,
    }  # fmt: skip
    for name, module in modules.items():
        module.register_forward_hook(
            lambda _, inputs, out, name=name: rows[name].append(inputs[0][..., 0].numel())
        )
    prompt = random_tokens(tiny_model(CASES["llama"]).config, 1, 50)
    theirs(twin, prompt, 3)
    assert rows["q_proj"] == rows["down_proj"] == [51, 2, 2]
    assert rows["k_proj"] == [50, 1, 1]
    assert rows["lm_head"] == [2, 2, 2]


def test_beams_keep_the_likeliest_continuation_of_r() -> None:
    native = tiny_model(CASES["llama"]).eval()
    twin, prompt = twin_of(native), random_tokens(native.config, 1, 5)
    wide = theirs(twin, prompt, 2, num_beams=53, length_penalty=0.0)[0]
    first = log_r_of(native, prompt)[0, -1]
    following = torch.cat([prompt.expand(53, -1), torch.arange(53)[:, None]], dim=1)
    total = first[:, None] + log_r_of(native, following)[:, -1]
    best = divmod(int(total.argmax()), 53)
    assert tuple(wide.tolist()) == best
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        beams = theirs(twin, prompt, 8, num_beams=4, num_return_sequences=2, **options)
        if not options:
            expected = beams
        assert torch.equal(beams, expected)


@pytest.mark.parametrize("case", ["llama", "gemma3", "padded_vocabulary"])
def test_sampling_draws_real_tokens_from_r(case: str) -> None:
    native = tiny_model(CASES[case]).eval()
    twin, prompt = twin_of(native), random_tokens(native.config, 4)
    drawn = theirs(twin, prompt.expand(4000, -1), 1, do_sample=True, top_k=0)[:, 0]
    assert int(drawn.max()) < native.config.num_real_tokens
    counts = torch.bincount(drawn, minlength=native.config.vocab_size) / 4000
    expected = log_r_of(native, prompt[None])[0, -1].exp()
    assert (counts - expected).abs().max() < 0.04
    longer = theirs(twin, prompt.expand(3, -1), 12, do_sample=True, top_k=5, top_p=0.9)
    assert longer.shape == (3, 12)


def test_generation_goes_on_from_a_kept_cache() -> None:
    native = tiny_model(CASES["gemma2"]).eval()
    twin, prompt = twin_of(native), random_tokens(native.config, 1, 6)
    first = twin.generate(
        prompt, max_new_tokens=5, do_sample=False, pad_token_id=EOS, eos_token_id=None,
        return_dict_in_generate=True,
    )  # fmt: skip
    more = torch.cat([first.sequences, random_tokens(native.config, 1, 4, seed=1)], dim=1)
    again = theirs(twin, more, 6, **{CACHE: first[CACHE]})
    assert again[0].tolist() == ours(native, more[0], 6)


def test_chosen_positions_and_embeddings_are_read_out() -> None:
    native = tiny_model(flow_config("tied_embedding")).eval()
    twin, ids = twin_of(native), random_tokens(native.config, 2, 12)
    expected = log_r_of(native, ids)
    with torch.inference_mode():
        chosen = torch.tensor([2, 7])
        assert torch.allclose(twin(ids, logits_to_keep=chosen).logits, expected[:, [2, 7]])
        assert torch.allclose(twin(ids, logits_to_keep=3).logits, expected[:, -3:])
        embeds = twin.get_input_embeddings()(ids)
        assert torch.allclose(twin(inputs_embeds=embeds).logits, expected)
    own = twin_of(tiny_model(CASES["llama"]))
    with pytest.raises(ValueError, match="needs input_ids beside inputs_embeds"):
        own(inputs_embeds=embeds)


def test_packed_texts_do_not_see_each_other() -> None:
    native = tiny_model(CASES["llama"]).eval()
    twin, ids = twin_of(native), random_tokens(native.config, 1, 12)
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.inference_mode():
        packed = twin(ids, position_ids=positions).logits
    expected = torch.cat([log_r_of(native, ids[:, :5]), log_r_of(native, ids[:, 5:])], dim=1)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-10)


def test_what_cannot_be_run_is_told() -> None:
    twin = twin_of(tiny_model(CASES["gpt2"]))
    with pytest.raises(ValueError, match="position 128 was asked for"):
        twin(torch.ones(1, 129, dtype=torch.long))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        twin(torch.ones(1, 5, dtype=torch.long), attention_mask=torch.ones(1, 1, 5, 5))
    with pytest.raises(ValueError, match="output_attentions is not supported"):
        twin(torch.ones(1, 5, dtype=torch.long), output_attentions=True)
    with pytest.raises(ValueError, match="retrofit it again"):
        twin.resize_token_embeddings(60)
    assert twin.resize_token_embeddings(53) is twin.get_input_embeddings()


def test_hidden_states_are_the_primarys() -> None:
    twin = twin_of(tiny_model(CASES["llama"]))
    ids = torch.tensor([[1, 2, 3]])
    on = twin(ids, output_hidden_states=True).hidden_states
    off = twin(ids, output_hidden_states=True, aux="off").hidden_states
    assert len(on) == 3
    for one, other in zip(on, off, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
