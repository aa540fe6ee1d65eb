"""Settings of every test: few threads, fixed seeds, a cache of its own."""

import os

# Before torch is imported anywhere: tiny models gain nothing from threads, and CI has two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# Nothing may ask the network; whoever tries fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "dualflow",
    derandomize=True,  # a failure seen once is seen by everyone
    deadline=None,  # timings on a shared machine say nothing
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", parent=settings.get_profile("dualflow"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dualflow"))


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Prepared data goes to a temporary folder that the whole session shares, never to the user's
    cache.
    """
    folder = tmp_path_factory.mktemp("dualflow-cache")
    before = os.environ.get("DUALFLOW_CACHE")
    os.environ["DUALFLOW_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["DUALFLOW_CACHE"]
    else:
        os.environ["DUALFLOW_CACHE"] = before


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same global random state; modules it has not imported stay
    unimported.
    """
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
