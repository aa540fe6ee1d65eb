"""From a model to an engine: number formats, the size of the cache, the backend."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dualflow.checkpoint import save_model
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.engine import Engine, EngineConfig, RequestParams, build_engine
from dualflow.engine import build as building
from dualflow.model import CausalLM, build_model
from dualflow.model.quantise import quantise_model
from dualflow.spec import ModelConfig
from dualflow.testing import tiny_config
from dualflow.testing.engines import run_all

DUAL = tiny_config("dual", vocab_size=259)
GREEDY = RequestParams(temperature=0, max_tokens=3)


def engine_of(model: CausalLM, **settings: Any) -> Engine:
    fields: dict[str, Any] = {"backend": "torch"} | settings
    return build_engine(model, None, EngineConfig(**fields))


@pytest.mark.parametrize("kv_dtype", ["float64", "float32", "bfloat16", "int8"])
def test_a_page_takes_the_bytes_that_are_reckoned(kv_dtype: Any) -> None:
    engine = engine_of(build_model(DUAL), num_pages=40, page_size=8, kv_dtype=kv_dtype)
    page = building.bytes_per_page(DUAL, 8, kv_dtype)
    assert engine.stats().cache_bytes == 40 * page


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_cache_of_a_dual_flow_model_is_that_of_its_standard_twin(kv_dtype: Any) -> None:
    standard = tiny_config("standard", vocab_size=259)
    sizes = [
        engine_of(build_model(config), num_pages=40, kv_dtype=kv_dtype).stats().cache_bytes
        for config in (DUAL, standard)
    ]
    assert sizes[0] == sizes[1]


def test_cache_bytes_are_spent_and_not_exceeded() -> None:
    page = building.bytes_per_page(DUAL, 16, "float32")
    engine = engine_of(build_model(DUAL), cache_bytes=10 * page + 5, page_size=16)
    assert engine.config.num_pages == 10
    with pytest.raises(ValueError, match=r"cache_bytes is 100, and one page takes [\d,]+"):
        engine_of(build_model(DUAL), cache_bytes=100)


def test_the_cache_is_as_large_as_needed_or_a_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model(DUAL)
    assert engine_of(model, max_running=3, page_size=32).config.num_pages == 3 * 128 // 32
    page = building.bytes_per_page(DUAL, 32, "float32")
    monkeypatch.setattr(building, "_free_memory", lambda: 4 * 7 * page)
    assert engine_of(model, max_running=3, page_size=32).config.num_pages == 7


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_cache_has_the_format_of_the_weights(dtype: str) -> None:
    model = build_model(DUAL, dtype=getattr(torch, dtype))
    assert building.cache_format(model, EngineConfig()) == dtype


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_a_folder_is_loaded_in_the_format_asked_for(weights: Any, tmp_path: Path) -> None:
    save_model(build_model(DUAL, dtype=torch.float64), tmp_path / "m")
    config = EngineConfig(weights=weights, backend="torch", num_pages=20)
    engine = Engine.load(tmp_path / "m", config)
    name = engine.add([97, 98], GREEDY)
    assert len(run_all(engine, [name])[name].outputs[0].token_ids) == 3


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int4"])
def test_quantised_weights_are_not_passed_off_as_others(weights: Any, tmp_path: Path) -> None:
    save_model(quantise_model(build_model(DUAL), "int8"), tmp_path / "m")
    with pytest.raises(ValueError, match=f"'{weights}', and .* holds int8"):
        Engine.load(tmp_path / "m", EngineConfig(weights=weights, backend="torch", num_pages=20))
    stored = Engine.load(
        tmp_path / "m", EngineConfig(weights="int8", backend="torch", num_pages=20)
    )
    assert stored.config.num_pages == 20


@pytest.mark.parametrize("size", [{"num_pages": 2**40}, {"cache_bytes": 2**60}])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_cache_larger_than_the_memory_is_refused(size: dict[str, int], backend: Any) -> None:
    with pytest.raises(ValueError, match=r"the cache would take [\d,]+ bytes, and there are"):
        engine_of(build_model(DUAL), backend=backend, **size)


def test_off_is_warned_of_with_what_the_folder_records(tmp_path: Path) -> None:
    metrics = {"val_loss": 1.0, "val_loss_p": 2.0}
    save_model(build_model(DUAL), tmp_path / "m", metrics=metrics)
    engine = Engine.load(tmp_path / "m", EngineConfig(backend="torch", num_pages=20))
    assert engine.aux_off_warning is not None


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        build_engine(build_model(tiny_config("dual")), bytes_tokenizer())


class TestBackend:
    def test_native_where_it_is_not_possible_says_why(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, building._NATIVE, None)
        with pytest.raises(ValueError, match=r"backend is 'native'.* not there"):
            engine_of(build_model(DUAL), backend="native", num_pages=20)
        assert engine_of(build_model(DUAL), backend="auto", num_pages=20) is not None

    @pytest.mark.parametrize("reason", [None, "no such instruction"])
    def test_auto_takes_native_where_it_can_run_the_model(
        self, reason: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[dict[str, Any]] = []
        module = FakeNative(reason, made)
        monkeypatch.setitem(sys.modules, building._NATIVE, module)  # type: ignore[arg-type]
        engine_of(build_model(DUAL), backend="auto", num_pages=20, threads=1)
        expected = {"num_pages": 20, "page_size": 32, "kv_dtype": "float32"}
        expected |= {"weights": "float32", "threads": 1}
        assert made == ([expected] if reason is None else [])
        if reason is not None:
            with pytest.raises(ValueError, match="no such instruction"):
                engine_of(build_model(DUAL), backend="native", num_pages=20)


class FakeNative:
    def __init__(self, reason: str | None, made: list[dict[str, Any]]) -> None:
        self._reason, self._made = reason, made

    def unsupported(self, model: CausalLM) -> str | None:
        return self._reason

    def NativeExecutor(self, model: CausalLM, **settings: Any) -> Any:
        self._made.append(settings)
        return None


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="device is 'cuda', and there is none here; usable: .*cpu"):
        building.pick_device("cuda")


def test_every_kind_of_model_can_be_built() -> None:
    from dualflow.testing.steps import EVERY_KIND

    for config in EVERY_KIND.values():
        assert isinstance(config, ModelConfig)
        assert engine_of(build_model(config), num_pages=20).stats().running == 0
