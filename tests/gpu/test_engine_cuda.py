"""The engine on a CUDA device gives what it gives on the CPU. Run with ``make gpu``."""

import pytest
import torch

from dualflow.engine import AuxPolicy, RequestParams
from dualflow.testing.engines import run_all, tiny_engine
from dualflow.testing.steps import EVERY_KIND
from dualflow.testing.tensors import random_tokens, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("policy", ["on", "exact"])
def test_a_mixed_batch_writes_the_tokens_of_the_cpu(name: str, policy: str) -> None:
    config = EVERY_KIND[name]
    written = []
    for device in ("cpu", "cuda"):
        engine = tiny_engine(tiny_model(config).to(device), max_step_tokens=16)
        requests = [
            engine.add(
                random_tokens(config, 5 + 3 * i, seed=i).tolist(),
                RequestParams(
                    max_tokens=12, temperature=i % 2, seed=i, aux=AuxPolicy.parse(policy)
                ),
            )
            for i in range(6)
        ]
        outputs = run_all(engine, requests)
        written.append([outputs[r].outputs[0].token_ids for r in requests])
    assert written[0] == written[1]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_narrow_caches_work_there(kv_dtype: str) -> None:
    config = EVERY_KIND["dual"]
    engine = tiny_engine(tiny_model(config).to("cuda"), kv_dtype=kv_dtype)
    request = engine.add(
        random_tokens(config, 9).tolist(), RequestParams(max_tokens=8, temperature=0)
    )
    assert len(run_all(engine, [request])[request].outputs[0].token_ids) == 8
