"""Models, texts and steps on which the kernel library is compared."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dualflow.engine.executor import Readout, SequenceRows, StepRows
from dualflow.engine.native_executor import NativeExecutor
from dualflow.engine.torch_executor import TorchExecutor
from dualflow.model import CausalLM, build_model
from dualflow.model.quantise import quantise_model
from dualflow.ops.native import library
from dualflow.spec import ModelConfig
from dualflow.testing.tensors import seeded

PAGE, NUM_PAGES = 16, 96
WORDS = 139
"""Ids that texts are made of; models have some more."""

BEST = None if library.why_missing() else library.load("baseline").df_best_isa().decode()
COMPILED = sorted(p.stem.removeprefix("_kernels_") for p in library.FOLDER.glob("_kernels_*.so"))
_ORDER = ("baseline", "avx2", "avx512", "avx512bf16")
RUNNABLE = [isa for isa in COMPILED if BEST and _ORDER.index(isa) <= _ORDER.index(BEST)]

need_kernels = pytest.mark.skipif(BEST is None, reason="the kernels are not compiled")
each_isa = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=pytest.mark.skipif(isa not in RUNNABLE, reason="not here"))
        for isa in COMPILED or ["baseline"]
    ],
)


def config_of(variant: Any = "dual", **changes: Any) -> ModelConfig:
    """Three layers; no size is a multiple of the kernels' 32 inputs of a group but one."""
    fields: dict[str, Any] = {
        "variant": variant, "vocab_size": 150, "hidden_size": 48, "num_layers": 3, "num_heads": 6,
        "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 80, "max_position": 800,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


@torch.no_grad()
def calm_model(config: ModelConfig, weights: str = "float32", seed: int = 1) -> CausalLM:
    """A model whose matrices keep the size of what passes through them, so that rounding does not
    grow on its way; gains, biases and couplings are random too.
    """
    model = build_model(config, 0).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=seeded(seed, name))
        if parameter.dim() > 1:
            table = "embed" in name and not config.tie_embeddings
            parameter.copy_(noise if table else noise * parameter.shape[-1] ** -0.5)
        else:
            is_gain = "norm" in name and name.endswith("weight") and not config.norm_offset
            parameter.copy_(noise * 0.3 + (1 if is_gain else 0))
    if weights == "bfloat16":
        return model.bfloat16()
    return quantise_model(model, weights) if weights in ("int8", "int4") else model  # type: ignore[arg-type]


def native(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch | None = None, isa: str | None = None,
    kv_dtype: str = "float32", threads: int = 1, num_pages: int = NUM_PAGES,
) -> NativeExecutor:  # fmt: skip
    """An executor on the library of one instruction set."""
    settings: dict[str, Any] = {"num_pages": num_pages, "page_size": PAGE}
    settings |= {"kv_dtype": kv_dtype, "threads": threads}
    if monkeypatch is None or isa is None:
        return NativeExecutor(model, **settings)
    kernels = library.load(isa)
    with monkeypatch.context() as patch:
        patch.setattr(library, "load", lambda: kernels)
        executor = NativeExecutor(model, **settings)
    assert executor._kernels.df_isa().decode() == isa
    return executor


@dataclass
class Texts:
    """Texts over one pool of pages, in which they lie in no order."""

    num_pages: int = NUM_PAGES
    seed: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.free = list(range(self.num_pages))
        self.random.shuffle(self.free)

    def add(self, length: int, pages: Sequence[int] | None = None) -> int:
        """A new text of so many random ids; its number."""
        whose = random.Random(f"{self.seed} {length}")
        self.tokens.append([whose.randrange(WORDS) for _ in range(length)])
        count = -(-length // PAGE)
        self.pages.append(list(pages) if pages else [self.free.pop() for _ in range(count)])
        self.done.append(0)
        return len(self.tokens) - 1

    def rows(
        self, counts: dict[int, int], read: int | None = None, aux: float = 1, keep: bool = False
    ) -> StepRows:
        """The next ``counts[text]`` rows of each text, the last ``read`` of them read (None: all),
        a share ``aux`` of those with auxiliary rows.
        """
        tokens: list[int] = []
        sequences, reads = [], []
        for text, count in counts.items():
            start = self.done[text]
            reads += range(len(tokens) + max(0, count - (count if read is None else read)),
                           len(tokens) + count)  # fmt: skip
            tokens += self.tokens[text][start : start + count]
            sequences.append(SequenceRows(start, count, self.pages[text], start))
            self.done[text] += count
        chosen = [i for i in range(len(reads)) if self.random.random() < aux]
        return StepRows(tokens, sequences, reads, chosen, keep)

    def left(self, text: int) -> int:
        return len(self.tokens[text]) - self.done[text]


def story(texts: Texts, flows: int) -> Iterator[StepRows]:
    """Prompts in chunks, decodes and both at once; not every row is read, nor has an auxiliary."""
    share = 0.6 if flows else 0
    long, middle, short = texts.add(620), texts.add(75), texts.add(6)
    yield texts.rows({long: 280}, read=1, aux=share, keep=True)
    yield texts.rows({short: 1, long: 17, middle: 40}, read=2, aux=share, keep=True)
    yield texts.rows({middle: 1, long: 250, short: 1}, read=3, aux=share, keep=True)
    yield texts.rows({long: 40, middle: 5}, read=0, aux=0)
    for _ in range(3):
        yield texts.rows({short: 1, middle: 1, long: 1}, read=1, aux=share, keep=True)
    yield texts.rows({long: 2}, read=2, aux=share, keep=True)
    yield texts.rows({long: 1}, read=1, aux=share, keep=True)


def differences(want: Readout, got: Readout) -> Tensor:
    """How far the log-probabilities of two readouts of the same rows lie apart: of the likelier
    half of the tokens, as tails are of no use to anyone.

    Rows whose r the reference leaves undefined (the auxiliary alone says what it is, and did not
    run) are compared by p and q alone.
    """
    assert got.q_index == want.q_index
    defined = [i for i in range(len(want.r)) if not want.r[i].isnan().any()]
    found = [torch.zeros(1)]
    for one, other in ((want.r[defined], got.r[defined]), (want.p, got.p), (want.q, got.q)):
        if one is None or not len(one):
            continue
        assert other is not None
        assert one.shape == other.shape
        assert torch.equal(one.isinf(), other.isinf())
        likely = one > one.median(dim=-1, keepdim=True).values
        found.append((one - other)[likely].abs())
    assert (want.alpha is None) == (got.alpha is None)
    if want.alpha and got.alpha:
        found.append((torch.tensor(want.alpha) - torch.tensor(got.alpha)).abs())
    every = torch.cat(found)
    for row in defined:
        gap = float(want.r[row, want.best[row]] - want.r[row, got.best[row]])
        assert gap <= 2 * float(every.max()), "another best token, and no near-tie"
    return every


@dataclass(frozen=True)
class Way:
    """One way to run the same texts."""

    threads: int = 1
    chunk: int = 1000
    together: bool = True
    lazy: bool = False
    only: tuple[int, ...] = ()


LENGTHS = (300, 40, 17, 1)


def distributions(executor: NativeExecutor, way: Way) -> dict[tuple[int, int], list[Tensor]]:
    """log r, log p and log q at every position of every text of LENGTHS (or ``way.only``), in
    chunks that grow from text to text.
    """
    texts = Texts()
    names = [texts.add(length) for length in LENGTHS]
    names = [name for name in names if not way.only or name in way.only]
    found: dict[tuple[int, int], list[Tensor]] = {}
    for group in [names] if way.together else [[name] for name in names]:
        while running := [name for name in group if texts.left(name)]:
            counts = {name: min(texts.left(name), way.chunk + name) for name in running}
            starts = {name: texts.done[name] for name in running}
            rows = texts.rows(counts, keep=way.lazy, aux=0 if way.lazy else 1)
            readout = executor.step(rows)
            if way.lazy and executor.config.num_flows:
                some = range(0, len(rows.read), 2)
                executor.add_aux(rows, readout, some)
                executor.add_aux(rows, readout, range(1, len(rows.read), 2))
            row = 0
            for name, count in counts.items():
                for position in range(starts[name], starts[name] + count):
                    assert readout.p is not None
                    found[name, position] = [readout.r[row].clone(), readout.p[row].clone()]
                    if readout.q is not None:
                        found[name, position].append(readout.q[readout.q_index[row]].clone())
                    row += 1
    return found


def assert_same_bits(
    one: dict[tuple[int, int], list[Tensor]], other: dict[tuple[int, int], list[Tensor]]
) -> None:
    """Equal bit by bit at every position of ``other``."""
    for where, tensors in other.items():
        for mine, theirs in zip(one[where], tensors, strict=True):
            gap = (mine - theirs).abs().max()
            assert torch.equal(mine, theirs), f"text and position {where}: {gap:.2e} apart"


UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "int8": 2.5 * 2.0**-16, "int4": 5 * 2.0**-16}
"""The largest relative error of one rounding of what a matrix in each format is multiplied with.

For int8 and int4 that are 16-bit codes, relative to the largest of 32 inputs, which is some 2.5
times as large as the usual one; and codes of int4 count from the group's minimum, which makes them
twice as large as the weights.
"""


def allowed(config: ModelConfig, weights: str, kv_dtype: str, isa: str) -> tuple[float, float]:
    """(worst, root mean square) of the differences of log-probabilities.

    A value passes some five products a layer, each of which rounds its input; errors of many
    inputs add up like random ones, so the result's is at most about unit · sqrt(5 L + 1) times the
    spread of the logits, which is near 1 in a calm model. The worst of some ten thousand is five
    times as far out. Sums in float32 are many roundings, hence sixteen units.
    """
    unit = 16 * UNITS["float32"]
    if weights in ("int8", "int4"):
        unit = UNITS[weights]
    if kv_dtype != "float32":  # both round alike, but for values that lie between two
        unit = max(unit, UNITS["bfloat16"] / 8)
    if isa == "avx512bf16" and (weights == "bfloat16" or kv_dtype != "float32"):
        unit = UNITS["bfloat16"]
    mean = unit * (5 * config.num_layers + 1) ** 0.5
    return 5 * mean, mean


def reference(model: CausalLM, kv_dtype: Any) -> TorchExecutor:
    """The torch executor in float32 over the same, rounded weights."""
    return TorchExecutor(model, NUM_PAGES, PAGE, kv_dtype=kv_dtype)


def run_story(mine: NativeExecutor, theirs: TorchExecutor) -> torch.Tensor:
    """All differences over the whole story, later auxiliary rows and a copied page included."""
    texts, found = Texts(NUM_PAGES), []
    for number, rows in enumerate(story(texts, mine.config.num_flows)):
        want, got = theirs.step(rows), mine.step(rows)
        found.append(differences(want, got))
        later = [i for i, place in enumerate(got.q_index) if place < 0][::2]
        if later and rows.keep and mine.config.num_flows:
            want, got = theirs.add_aux(rows, want, later), mine.add_aux(rows, got, later)
            found.append(differences(want, got))
        if number == 2:
            target = texts.free.pop()
            for executor in (mine, theirs):
                executor.copy_pages([(texts.pages[0][-5], target)])
            texts.pages[0][-5] = target
    return torch.cat(found)


def check(model: CausalLM, mine: NativeExecutor, kv_dtype: str, weights: str) -> None:
    """Over the whole story within what ``weights`` and ``kv_dtype`` allow."""
    isa = mine._kernels.df_isa().decode()
    found = run_story(mine, reference(as_float(model), kv_dtype))
    worst, mean = allowed(model.config, weights, kv_dtype, isa)
    assert found.max() < worst
    assert found.square().mean().sqrt() < mean


def as_float(model: CausalLM) -> CausalLM:
    """The same rounded weights, computed with in float32."""
    if model.lm_head.weight.dtype != torch.bfloat16:
        return model
    twin = calm_model(model.config)
    twin.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return twin
