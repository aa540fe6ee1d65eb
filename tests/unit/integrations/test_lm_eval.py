"""lm-eval's questions answered by our engine, against plain float64 loops over the model."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from dualflow.checkpoint import save_model
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.engine.request import AuxPolicy, RequestError
from dualflow.integrations.lm_eval import DualFlowLM, generation_params
from dualflow.model import CausalLM
from dualflow.spec import ModelConfig
from dualflow.testing.steps import whole_sequence
from dualflow.testing.tensors import tiny_model

EOS = bytes_tokenizer().eos_id
POSITIONS = 24
CONFIG = ModelConfig(
    variant="dual", vocab_size=259, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    intermediate_size=24, max_position=POSITIONS,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lm-eval") / "model"
    save_model(tiny_model(CONFIG), place, tokenizer_json=bytes_tokenizer().to_json())
    return place


@pytest.fixture(params=["on", "off"])
def aux(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def adapter(folder: Path, aux: str) -> DualFlowLM:
    return DualFlowLM(folder, aux=aux, weights="float64", device="cpu", threads=1)


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def log_probs(tokens: Sequence[int], aux: str, model: CausalLM | None = None) -> torch.Tensor:
    """[tokens, vocabulary]: log r, or log p with the auxiliary off, after each token."""
    model = model or tiny_model(CONFIG)
    with torch.no_grad():
        out = whole_sequence(model, torch.tensor(tokens))
        read = model.log_probs(out.primary_TD, out.aux_FAD)
    found = read.r if aux == "on" else read.p
    assert found is not None
    return found


def score(before: Sequence[int], ids: Sequence[int], aux: str) -> tuple[float, bool]:
    """Σ log r of ``ids`` after ``before``, and whether greedy sampling would write them."""
    rows = log_probs([*before, *ids], aux)[len(before) - 1 : -1]
    picked = rows[torch.arange(len(ids)), torch.tensor(ids)]
    return float(picked.sum()), bool((rows.argmax(-1) == torch.tensor(ids)).all())


def ask(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]  # type: ignore[arg-type]


def test_continuations_of_one_and_many_tokens(adapter: DualFlowLM, aux: str):
    pairs = [("ab", "c"), ("ab", "cdef"), ("abc", " x"), ("a", "b"), ("ab", "c")]
    found = adapter.loglikelihood(ask("loglikelihood", *pairs))
    for (context, text), (log_r, greedy) in zip(pairs, found, strict=True):
        wanted = score(ids_of(context), ids_of(text), aux)
        assert log_r == pytest.approx(wanted[0], abs=1e-9)
        assert greedy == wanted[1]


def test_greedy_continuations_are_told(adapter: DualFlowLM, aux: str):
    best = [97]
    while len(best) < 4:
        best.append(int(log_probs(best, aux)[-1].argmax()))
    other = [*best[:3], (best[3] + 1) % 256]
    pairs = [(None, [97], ids[1:end]) for ids in (best, other) for end in (2, 4)]
    found = [greedy for _, greedy in adapter._loglikelihood_tokens(pairs)]
    assert found == [True, True, True, False]


def test_the_end_of_text_stands_before_what_has_nothing_before_it(adapter: DualFlowLM, aux: str):
    ((log_r, _),) = adapter.loglikelihood(ask("loglikelihood", ("", "hey")))
    assert log_r == pytest.approx(score([EOS], ids_of("hey"), aux)[0], abs=1e-9)


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(adapter: DualFlowLM, aux: str):
    ((log_r, _),) = adapter.loglikelihood(ask("loglikelihood", ("ab  ", "c")))
    assert log_r == pytest.approx(score(ids_of("ab"), ids_of("  c"), aux)[0], abs=1e-9)


def test_every_position_of_the_model_is_used_and_no_more(adapter: DualFlowLM, aux: str):
    context, text = "abcdefgh" * 5, "xyz"
    for length in (POSITIONS - 3, POSITIONS - 2, POSITIONS - 1, POSITIONS + 9):
        ((log_r, _),) = adapter.loglikelihood(ask("loglikelihood", (context[:length], text)))
        # The last token of the continuation is predicted, and takes no position itself.
        kept = ids_of(context[:length])[-(POSITIONS - 2) :]
        rows = log_probs([*kept, *ids_of(text)][:-1], aux)[-3:]
        wanted = float(rows[torch.arange(3), torch.tensor(ids_of(text))].sum())
        assert log_r == pytest.approx(wanted, abs=1e-9)


def test_a_continuation_longer_than_the_model_is_refused(adapter: DualFlowLM):
    with pytest.raises(ValueError, match="continuation has 25 tokens; the model has 24 positions"):
        adapter.loglikelihood(ask("loglikelihood", ("a", "x" * 25)))


@pytest.mark.parametrize("length", [1, POSITIONS, POSITIONS + 1, 3 * POSITIONS + 5])
def test_rolling_texts_count_each_token_once(adapter: DualFlowLM, aux: str, length: int):
    text = ("The quick brown fox jumps over the lazy dog. " * 3)[:length]
    ids = ids_of(text)
    wanted = 0.0
    for begin in range(0, length, POSITIONS):
        end = min(begin + POSITIONS, length)
        inputs = [EOS, *ids][max(0, end - POSITIONS) : end]  # what predicts ids[.. end)
        rows = log_probs(inputs, aux)[begin - end :]
        wanted += float(rows[torch.arange(end - begin), torch.tensor(ids[begin:end])].sum())
    assert adapter.loglikelihood_rolling(ask("loglikelihood_rolling", (text,))) == [
        pytest.approx(wanted, abs=1e-8)
    ]


def test_texts_are_greedy_and_end_before_a_stop(adapter: DualFlowLM, aux: str):
    ids = ids_of("Say")
    for _ in range(8):
        ids.append(int(log_probs(ids, aux)[-1].argmax()))
    text = bytes_tokenizer().decode([token for token in ids[3:] if token < 256])
    stop = text[4]
    found = adapter.generate_until(
        ask(
            "generate_until",
            ("Say", {"until": [], "max_gen_toks": 8}),
            ("Say", {"until": [stop], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0}),
        )
    )
    assert EOS not in ids  # else this shows less
    assert found == [text, text.split(stop)[0]]


def test_long_prompts_lose_their_beginning(adapter: DualFlowLM, aux: str):
    prompt = "abcdefgh" * 5
    ids = ids_of(prompt)[-(POSITIONS - 2) :]
    for _ in range(2):
        ids.append(int(log_probs(ids, aux)[-1].argmax()))
    (found,) = adapter.generate_until(ask("generate_until", (prompt, {"max_gen_toks": 2})))
    assert found == bytes_tokenizer().decode(ids[-2:], skip_special=True)


def test_a_task_that_wants_more_tokens_than_the_model_has_is_refused(adapter: DualFlowLM):
    with pytest.raises(ValueError, match="asks for 256 new tokens, the model has 24 positions"):
        adapter.generate_until(ask("generate_until", ("a", {"until": ["."]})))


def test_exact_scores_as_on_does(folder: Path):
    settings = {"weights": "float64", "device": "cpu", "threads": 1}
    on, exact = (DualFlowLM(folder, aux=kind, **settings) for kind in ("on", "exact"))
    requests = ask("loglikelihood", ("ab", "cd"), ("ab", "e"))
    assert on.loglikelihood(requests) == exact.loglikelihood(requests)


def test_a_beginning_of_text_goes_before_texts_where_the_tokenizer_puts_it(tmp_path: Path):
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    backend = tokenizers.Tokenizer.from_str(bytes_tokenizer().to_json())
    name = "<|im_start|>"
    number = backend.token_to_id(name)
    assert number is not None
    processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, number)])
    backend.post_processor = processor  # type: ignore[assignment]
    save_model(tiny_model(CONFIG), tmp_path / "m", tokenizer_json=backend.to_str())
    (tmp_path / "m/tokenizer_config.json").write_text(f'{{"bos_token": "{name}"}}')
    settings = {"weights": "float64", "device": "cpu", "threads": 1}
    adapter = DualFlowLM(tmp_path / "m", **settings)
    assert adapter.prefix_token_id == number
    assert adapter.tok_encode("ab") == adapter.tok_encode(f"{name}ab") == [number, 97, 98]
    assert adapter.tok_encode("ab", add_special_tokens=False) == [97, 98]
    ((log_r, _),) = adapter.loglikelihood(ask("loglikelihood", ("ab", "cd")))
    assert log_r == pytest.approx(score([number, 97, 98], ids_of("cd"), "on")[0], abs=1e-9)
    without = DualFlowLM(tmp_path / "m", add_bos=False, **settings)
    assert without.tok_encode("ab") == [97, 98]


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path):
    save_model(tiny_model(CONFIG), tmp_path / "m")
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        DualFlowLM(tmp_path / "m", device="cpu")


def test_generation_settings_become_the_engines():
    aux = AuxPolicy("exact")
    greedy = generation_params({"until": "\n", "max_gen_toks": 5, "temperature": 0.0}, aux)
    assert (greedy.max_tokens, greedy.stop, greedy.temperature) == (5, ("\n",), 0.0)
    assert greedy.aux == aux
    sampled = generation_params({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, aux)
    assert (sampled.max_tokens, sampled.temperature, sampled.top_p) == (256, 0.7, 0.9)
    with pytest.warns(UserWarning, match="do_sample is false"):
        assert generation_params({"do_sample": False, "temperature": 0.7}, aux).greedy


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"top_r": 1}, "name top_r; known: "),
        ({"num_beams": 4}, "num_beams 4; only 1 is supported"),
        ({"max_gen_toks": 0}, "max_tokens is 0"),
    ],
)
def test_unknown_generation_settings_are_refused(wanted: dict, found: str):
    with pytest.raises((ValueError, RequestError), match=found):
        generation_params(wanted, AuxPolicy())
