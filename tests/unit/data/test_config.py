import dataclasses
import subprocess
import sys

import pytest

from dualflow import config as toml
from dualflow.data.config import DataConfig, bpe_size


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"source": ""}, "source is empty"),
        ({"sequence_length": 0}, "sequence_length is 0; expected at least 1"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"validation_fraction": -0.1}, "validation_fraction is -0.1"),
        ({"validation_fraction": float("nan")}, "validation_fraction is nan"),
        ({"tokenizer_sample": 0}, "tokenizer_sample is 0"),
        ({"on_end": "spin"}, "on_end is 'spin'; expected 'repeat' or 'stop'"),
        ({"tokenizer": "bpe"}, "such as bpe:1024"),
        ({"tokenizer": "bpe:258"}, "at least bpe:259"),
        ({"tokenizer": "bpe:1000001"}, "at most bpe:1000000"),
        ({"tokenizer": "bpe:" + "9" * 10_000}, "at most bpe:1000000"),
        ({"tokenizer": "bpe:many"}, "whole number"),
        ({"tokenizer": "bpe:²"}, "whole number"),
    ],
)
def test_impossible_settings_are_named_with_what_was_expected(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        DataConfig(**changes)


def test_survives_the_way_through_toml_and_json():
    config = DataConfig(source="a.txt", tokenizer="bytes", cache_dir=None, on_end="stop")
    assert toml.from_dict(DataConfig, toml.to_dict(config)) == config
    changed = toml.override(config, ["sequence_length=8", "document_mask=true"])
    assert changed == dataclasses.replace(config, sequence_length=8, document_mask=True)


@pytest.mark.parametrize(("name", "size"), [("bpe:300", 300), ("bytes", None), ("a/b.json", None)])
def test_size_of_a_bpe(name, size):
    assert bpe_size(name) == size


def test_everything_but_the_loader_does_without_torch():
    code = "import sys, dualflow.data, dualflow.cli.data; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
