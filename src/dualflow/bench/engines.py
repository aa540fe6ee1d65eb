"""The engines that are measured: a standard model's and its Dual-Flow counterpart's, with equal
settings, and how requests are run on them.

Models in memory, without tokenizers: prompts are ids, and nothing ends a text but its length.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import dualflow
from dualflow.bench.pairs import made_up_tokens
from dualflow.checkpoint import load_model, load_tokenizer_of
from dualflow.data.tokenizers import Tokenizer
from dualflow.engine.build import build_engine, cache_format, weights_format
from dualflow.engine.config import EngineConfig
from dualflow.engine.engine import Engine
from dualflow.engine.outputs import FinishEvent, TokenEvent
from dualflow.engine.request import AuxPolicy, RequestParams
from dualflow.model import CausalLM, build_model
from dualflow.recipes.demo import as_dual
from dualflow.spec import PRESETS, ModelConfig, standard_twin

Sampling = Literal["greedy", "sampled"]

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which model is measured and how it is run; fields of ``EngineConfig`` as there.

    model:  a model or run folder; None: the preset ``preset`` with random values.
    layers: of the preset, where not all.
    """

    model: Path | None = None
    preset: str = "smollm2-135m"
    layers: int | None = None
    weights: str = "auto"
    kv_dtype: str = "auto"
    backend: str = "auto"
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the things compared.

    aux:       None for the standard model.
    sampling:  ``greedy``, or ``sampled`` from r as it is.
    """

    variant: Literal["standard", "dual"]
    aux: str | None
    sampling: Sampling

    @property
    def label(self) -> str:
        """For people."""
        policy = "" if self.aux is None else f", aux {self.aux}"
        return f"{self.variant}{policy}"


SIDES = tuple(
    Side(variant=variant, aux=aux, sampling=sampling)  # type: ignore[arg-type]
    for sampling in ("greedy", "sampled")
    for variant, aux in (("standard", None), ("dual", "on"), ("dual", "off"), ("dual", "exact"))
)
"""Standard first: the others are given as ratios to the one with the same sampling."""


class ModelPair:
    """A standard model and the Dual-Flow model with the same primary.

    name:       for the rows.
    tokenizer:  of a model that was loaded; prompts are then real text, on which α and with it the
                cost of ``exact`` depend.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer: Tokenizer | None = None
        if settings.model is None:
            config = PRESETS[settings.preset]
            self.name = f"{settings.preset}, random values"
            if settings.layers is not None:
                config = dataclasses.replace(config, num_layers=settings.layers)
                self.name = f"{settings.preset}, {settings.layers} layers, random values"
            standard, dual = build_model(config), build_model(as_dual(config))
        else:
            self.name = settings.model.resolve().name
            standard, dual = _twins(load_model(settings.model), settings.model)
            self.tokenizer = load_tokenizer_of(settings.model)
        self.standard, self.dual = (_cast(m, settings.weights) for m in (standard, dual))

    @property
    def config(self) -> ModelConfig:
        """Of the standard model."""
        return self.standard.config

    def require_positions(self, tokens: int) -> None:
        """Raise ``ValueError`` where texts of ``tokens`` are too long for the model."""
        if tokens > self.config.max_position:
            raise ValueError(
                f"{self.name} has {self.config.max_position:,} positions, and this benchmark takes "
                f"{tokens:,}; try --quick, or another model"
            )

    def engine(self, variant: str, *, tokens: int, running: int, prefix_cache: bool) -> Engine:
        """An engine whose cache holds ``tokens`` for each of ``running`` requests."""
        settings = self.settings
        page_size = EngineConfig().page_size
        config = EngineConfig(
            page_size=page_size,
            # One more for each: the scheduler keeps pages back for those that grow.
            num_pages=running * (-(-tokens // page_size) + 1),
            max_running=running,
            prefix_cache=prefix_cache,
            kv_dtype=settings.kv_dtype,  # type: ignore[arg-type]
            backend=settings.backend,  # type: ignore[arg-type]
            threads=settings.threads,
        )
        model = self.standard if variant == "standard" else self.dual
        import warnings

        with warnings.catch_warnings():
            # The cache is meant to be smaller than the model's length.
            warnings.simplefilter("ignore", UserWarning)
            return build_engine(model, None, config)

    def prompts(self, *lengths: int) -> list[list[int]]:
        """Prompts of these lengths, different ones, the same every time."""
        ids = self._text(sum(lengths))
        prompts: list[list[int]] = []
        start = 0
        for length in lengths:
            prompts.append(ids[start : start + length])
            start += length
        return prompts

    def _text(self, count: int) -> list[int]:
        if self.tokenizer is None:
            return made_up_tokens(self.config, count).tolist()
        package = Path(dualflow.__file__).parent
        text = "\n".join(path.read_text("utf-8") for path in sorted(package.rglob("*.py")))
        ids = self.tokenizer.encode(text)
        return (ids * -(-count // len(ids)))[:count]


def described(pair: ModelPair, engine: Engine) -> dict[str, str]:
    """What rows say of a model and how an engine runs it."""
    return {
        "model": pair.name,
        "weights": weights_format(pair.standard),
        "kv_dtype": cache_format(pair.standard, engine.config),
        "backend": engine.config.backend,
    }


@dataclass(frozen=True)
class Track:
    """How one request went. Times are in seconds on ``time.perf_counter``'s clock.

    started:  when it was asked for.
    times:    of its tokens, each when the step that gave it had ended.
    end:      its last event.
    """

    started: float
    times: tuple[float, ...]
    end: FinishEvent

    @property
    def first_token_seconds(self) -> float:
        """From asking to the first token."""
        return self.times[0] - self.started


def run_together(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: RequestParams,
    rounds: Iterator[int] | None = None,
) -> list[Track]:
    """Run requests that all come at once.

    rounds:  numbers whose next one decides the seeds, so that ``exact`` meets other numbers each
             time; None: 0.
    """
    first = len(prompts) * (0 if rounds is None else next(rounds))
    started = time.perf_counter()
    names = [
        engine.add(prompt, dataclasses.replace(params, seed=seed))
        for seed, prompt in enumerate(prompts, first)
    ]
    times: dict[str, list[float]] = {name: [] for name in names}
    ends: dict[str, FinishEvent] = {}
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, TokenEvent):
                times[event.request_id].append(now)
            elif isinstance(event, FinishEvent):
                ends[event.request_id] = event
    for name in names:
        if ends[name].reason != "length":
            reason, error = ends[name].reason, ends[name].error
            raise RuntimeError(f"a request of the benchmark ended with {reason!r}: {error}")
    return [Track(started, tuple(times[name]), ends[name]) for name in names]


def params_of(side: Side, max_tokens: int) -> RequestParams:
    """Exactly ``max_tokens`` tokens, chosen as ``side`` says."""
    return RequestParams(
        max_tokens=max_tokens,
        temperature=0.0 if side.sampling == "greedy" else 1.0,
        aux=AuxPolicy.parse(side.aux or "on"),
        ignore_eos=True,
    )


def _twins(model: CausalLM, folder: Path) -> tuple[CausalLM, CausalLM]:
    """The standard and the dual model of a loaded one of either kind, the other made of it."""
    if model.quantised is not None:
        raise ValueError(
            f"{folder} holds {model.quantised} weights; name the model they were made from, and "
            f"--weights {model.quantised}"
        )
    config, dtype = model.config, model.lm_head.weight.dtype
    if config.variant == "dual":
        standard = build_model(standard_twin(config), None, dtype=dtype)
        own = standard.state_dict()
        standard.load_state_dict({n: t for n, t in model.state_dict().items() if n in own})
        return standard, model
    if config.variant != "standard":
        raise ValueError(
            f"{folder} holds a {config.variant} model; expected a standard or a dual one"
        )
    dual = build_model(as_dual(config), dtype=dtype)  # couplings start at zero
    values = model.state_dict()
    values["model.aux.0.embed_tokens.weight"] = values["model.embed_tokens.weight"]
    missing, unexpected = dual.load_state_dict(values, strict=False)
    assert not unexpected and all(".aux." in name for name in missing)
    return model, dual


def _cast(model: CausalLM, weights: str) -> CausalLM:
    if weights == "auto":
        return model
    if weights in _DTYPES:
        return model.to(_DTYPES[weights])
    from dualflow.model.quantise import quantise_model

    return quantise_model(model, weights)  # type: ignore[arg-type]
