"""The paged cache: formats, sizes, and that what one sequence leaves hurts no other."""

import math
from typing import Any

import pytest
import torch

from dualflow.engine.kv_cache import PagedCache
from dualflow.engine.torch_executor import TorchExecutor
from dualflow.plan import kv_bytes_per_token
from dualflow.spec import standard_twin
from dualflow.testing import tiny_config
from dualflow.testing.steps import EVERY_KIND
from dualflow.testing.tensors import random_tokens, tiny_model
from tests.unit.engine.steps import assert_close, expected, rows_of, shuffled_pages

FORMATS = {"float64": 8, "float32": 4, "bfloat16": 2}


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("dtype", [*FORMATS, "int8"])
def test_a_models_cache_is_its_standard_twins_to_the_byte(name: str, dtype: Any) -> None:
    config = EVERY_KIND[name]
    twin = standard_twin(config)
    sizes = {PagedCache(c, 5, 4, dtype).nbytes for c in (config, twin)}
    per_token = 4 * config.num_layers * 2 * config.kv_heads  # int8's scales
    if dtype in FORMATS:
        assert sizes == {20 * kv_bytes_per_token(config, FORMATS[dtype])}
    else:
        assert sizes == {20 * (kv_bytes_per_token(config, 1) + per_token)}


@pytest.mark.parametrize(("dtype", "nats"), [("float32", 1e-5), ("bfloat16", 0.1), ("int8", 0.15)])
@pytest.mark.parametrize("name", ["standard", "dual", "phd2"])
def test_smaller_formats_are_close(name: str, dtype: Any, nats: float) -> None:
    model = tiny_model(EVERY_KIND[name], dtype=torch.float32)
    ids = random_tokens(model.config, 40).tolist()
    executor = TorchExecutor(model, 10, 4, dtype)
    (pages,) = shuffled_pages(1, 10)
    executor.step(rows_of([(ids[:30], 0, pages, [], [])]))
    readout = executor.step(rows_of([(ids[30:], 30, pages, range(10), range(10))]))
    want = expected(model, ids).r[30:]
    difference = (readout.r - want).abs()
    assert float(difference.max()) < nats
    assert dtype == "float32" or float(difference.max()) > 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_chunks_do_not_matter_in_any_format(dtype: Any) -> None:
    """What is read is what was stored, also by the rows of the step that stored it."""
    model = tiny_model(tiny_config("dual"), dtype=torch.float32)
    ids = random_tokens(model.config, 24).tolist()
    readouts = []
    for chunk in (1, 5, 24):
        executor = TorchExecutor(model, 6, 4, dtype)
        (pages,) = shuffled_pages(1, 6, seed=chunk)
        for start in range(0, 24, chunk):
            own = ids[start : start + chunk]
            last = len(own) - 1
            readout = executor.step(rows_of([(own, start, pages, [last], [last])]))
        readouts.append(readout.r)
    for other in readouts[1:]:
        assert_close(other, readouts[0], atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_numbers_that_are_none_stay_where_they_came_from(dtype: Any) -> None:
    """Pages that held NaN are used again, beside longer sequences that make the batch read on."""
    model = tiny_model(tiny_config("dual"), dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = math.nan
    executor = TorchExecutor(model, 8, 4, dtype)
    bad = executor.step(rows_of([([9] * 32, 0, list(range(8)), [31], [31])]))
    assert bool(bad.r.isnan().all())
    ids = [i if i != 9 else 10 for i in random_tokens(model.config, 14).tolist()]
    parts = [(ids[:13], 0, [3, 1, 5, 2], [12], [12]), (ids[:9], 0, [0, 7, 4], [8], [8])]
    executor.step(rows_of(parts))
    parts = [([ids[13]], 13, [3, 1, 5, 2], [0], [0]), ([ids[9]], 9, [0, 7, 4], [0], [0])]
    readout = executor.step(rows_of(parts))
    clean = TorchExecutor(model, 8, 4, dtype)
    for row, length in enumerate((14, 10)):
        alone = clean.step(rows_of([(ids[:length], 0, [0, 1, 2, 3], [length - 1], [length - 1])]))
        assert_close(readout.r[row], alone.r[0], atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 4, "float32"), "num_pages is 0"), ((3, 0, "float32"), "page_size is 0"),
     ((3, 4, "float16"), "'float16'; expected float64")],
)  # fmt: skip
def test_what_is_no_cache_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedCache(tiny_config(), *arguments)


def test_later_auxiliary_rows_need_what_the_step_kept() -> None:
    model = tiny_model(tiny_config("dual"))
    executor = TorchExecutor(model, 3, 4)
    rows = rows_of([([1, 2, 3], 0, [0], [1, 2], [2])])
    readout = executor.step(rows)
    with pytest.raises(ValueError, match="kept nothing"):
        executor.add_aux(rows, readout, [0])
    rows = rows_of([([1, 2, 3], 0, [0], [1, 2], [2])], keep=True)
    readout = executor.step(rows)
    with pytest.raises(ValueError, match="have auxiliary rows already"):
        executor.add_aux(rows, readout, [1])
    assert executor.add_aux(rows, readout, []) is readout
