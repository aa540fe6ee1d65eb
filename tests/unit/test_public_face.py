"""``import dualflow``: instant, without torch, and every public name is there when asked for."""

import subprocess
import sys

import pytest

import dualflow


@pytest.mark.parametrize("name", dualflow.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(dualflow, name) is not None
    assert name in dir(dualflow)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dualflow' has no attribute 'nothing'"):
        _ = dualflow.nothing


@pytest.mark.parametrize(
    "statement",
    [
        "import dualflow",
        "from dualflow import ModelConfig, preset",
        "import dualflow.config, dualflow.spec, dualflow.extras, dualflow.folders",
        "import dualflow.plan",
        "from dualflow import AuxPolicy, EngineConfig, RequestParams, StructuredOutput",
        "import dualflow.engine.scheduler, dualflow.engine.outputs",
        "import dualflow.testing",
        "import dualflow.cli.main",
    ],
)
def test_plain_data_needs_no_torch(statement: str) -> None:
    code = f"{statement}\nimport sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_plain_import_works_without_any_optional_package() -> None:
    """As in an environment that has the core requirements alone."""
    optional = ("tensorboard", "pyarrow", "datasets", "matplotlib", "transformers", "pandas")
    code = (
        f"import sys\nfor name in {optional}: sys.modules[name] = None\n"
        "import importlib, dualflow\n"
        "for name in dualflow.__all__: getattr(dualflow, name)\n"
        "for name in ('data', 'train', 'evaluate'): importlib.import_module(f'dualflow.{name}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
