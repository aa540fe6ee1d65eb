import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dualflow.config import override
from dualflow.model import build_model
from dualflow.train.checkpoints import (
    Progress,
    find_checkpoint,
    read_checkpoint,
    restore,
    save_checkpoint,
)
from dualflow.train.config import RunConfig
from dualflow.train.initial import Origin
from dualflow.train.optimizers import Optimizers
from dualflow.train.parallel import Parallel

TinyRun = Callable[..., RunConfig]


@pytest.fixture
def config(tiny_run: TinyRun) -> RunConfig:
    return tiny_run()


def save(folder: Path, config: RunConfig, step: int) -> Path:
    model = build_model(config.model)
    optimizers = Optimizers(model, config.optimizer)
    tokens = torch.arange(64).view(4, 16)
    model.loss(tokens, tokens, None).total.backward()
    optimizers.step()
    progress = Progress(step=step, tokens=64 * step, train_seconds=1.5)
    saved = save_checkpoint(
        folder, model, optimizers, progress, {"position": step}, config,
        origin=Origin(), parallel=Parallel(),
    )  # fmt: skip
    assert saved is not None
    return saved


def test_a_checkpoint_gives_back_progress_loader_and_optimizer_state(
    tmp_path: Path, config: RunConfig
) -> None:
    folder = save(tmp_path, config, 3)
    state = read_checkpoint(folder, config)
    assert (state.progress.step, state.progress.tokens, state.progress.train_seconds) == (
        3,
        192,
        1.5,
    )
    assert state.loader == {"position": 3}
    optimizers = Optimizers(build_model(config.model), config.optimizer)
    restore(state, optimizers, Parallel())
    saved = optimizers.state_tensors()
    assert any(name.startswith("muon/") for name in saved)
    assert any(name.endswith("exp_avg_sq") for name in saved)
    for name, tensor in saved.items():
        assert torch.equal(tensor, state.tensors[f"optimizer/{name}"])


def test_the_random_generator_continues_where_it_was(tmp_path: Path, config: RunConfig) -> None:
    torch.manual_seed(5)
    folder = save(tmp_path, config, 1)
    expected = torch.rand(4)
    torch.manual_seed(6)
    optimizers = Optimizers(build_model(config.model), config.optimizer)
    restore(read_checkpoint(folder, config), optimizers, Parallel())
    assert torch.equal(torch.rand(4), expected)


def test_it_is_resumed_by_as_many_ranks(tmp_path: Path, config: RunConfig) -> None:
    state = read_checkpoint(save(tmp_path, config, 1), config)
    optimizers = Optimizers(build_model(config.model), config.optimizer)
    with pytest.raises(ValueError, match="saved by 1 ranks, now there are 2"):
        restore(state, optimizers, Parallel(rank=1, world_size=2))


def test_only_the_newest_are_kept_and_latest_names_the_last(
    tmp_path: Path, config: RunConfig
) -> None:
    for step in (4, 8, 12):
        save(tmp_path, config, step)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-00000008", "step-00000012"]
    assert (tmp_path / "latest").read_text().strip() == "step-00000012"
    assert find_checkpoint(tmp_path) == tmp_path / "step-00000012"


def test_one_left_over_beyond_the_newest_is_removed(tmp_path: Path, config: RunConfig) -> None:
    for step in (4, 8):
        save(tmp_path, config, step)
    (tmp_path / "latest").write_text("step-00000004")
    assert find_checkpoint(tmp_path) == tmp_path / "step-00000004"
    save(tmp_path, config, 6)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [
        "step-00000004",
        "step-00000006",
    ]


@pytest.mark.parametrize(
    "pointer", [None, "", "step-00000099", "../../elsewhere", "/etc", "x" * 5000, "a\0b", "\udcff"]
)
def test_without_a_good_pointer_the_highest_whole_step_is_taken(
    tmp_path: Path, config: RunConfig, pointer: str | None
) -> None:
    save(tmp_path, config, 4)
    save(tmp_path, config, 8)
    (tmp_path / "step-00000009").mkdir()  # not whole
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_bytes(pointer.encode(errors="surrogateescape"))
    assert find_checkpoint(tmp_path) == tmp_path / "step-00000008"


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "none") is None


def test_another_configuration_is_refused_naming_the_fields(
    tmp_path: Path, config: RunConfig
) -> None:
    folder = save(tmp_path, config, 1)
    read_checkpoint(folder, override(config, ["name=renamed", "train.log_every=3"]))
    other = override(config, ["optimizer.lr=0.5", "seed=7"])
    with pytest.raises(ValueError, match=r"optimizer\.lr \(0\.01 there, 0\.5 now\), seed \(0 "):
        read_checkpoint(folder, other)


def test_damaged_state_is_one_line(tmp_path: Path, config: RunConfig) -> None:
    folder = save(tmp_path, config, 1)
    (folder / "trainer.safetensors").write_bytes(b"\x00" * 30)
    with pytest.raises(ValueError, match="not a checkpoint that can be resumed"):
        read_checkpoint(folder, config)
    header = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps(header | {"format_version": 99}))
    with pytest.raises(ValueError, match="format_version is 99"):
        read_checkpoint(folder, config)
    (folder / "trainer.json").write_text("{")
    with pytest.raises(ValueError, match="not a checkpoint that can be resumed"):
        read_checkpoint(folder, config)


class Trap:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


def test_pickled_state_is_never_run(tmp_path: Path, config: RunConfig) -> None:
    folder = save(tmp_path, config, 1)
    marker = tmp_path / "marker"
    for name in ("trainer.safetensors", "trainer.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Trap(marker)))
        with pytest.raises(ValueError, match="not a checkpoint that can be resumed"):
            read_checkpoint(folder, config)
        (folder / name).write_bytes(kept)
    assert not marker.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "8"},
        {"tokens": None},
        {"train_seconds": "long"},
        {"validation": 3},
        {"validation": {}},
        {"loader": 5},
        {"config": None, "fingerprint": "x"},
        {"fingerprint": None},
        {"digests": 3},
    ],
)
def test_a_value_of_the_wrong_kind_is_named(
    tmp_path: Path, config: RunConfig, changes: dict[str, object]
) -> None:
    folder = save(tmp_path, config, 1)
    header = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps(header | changes))
    with pytest.raises(ValueError, match="cannot|can be resumed") as caught:
        read_checkpoint(folder, config)
    assert changes == {"validation": {}} or next(iter(changes)) in str(caught.value)
    assert "go on from the checkpoint before it" in str(caught.value)


def test_a_flipped_bit_in_the_tensors_is_noticed(tmp_path: Path, config: RunConfig) -> None:
    folder = save(tmp_path, config, 1)
    for path in folder.glob("*.safetensors"):
        kept = path.read_bytes()
        path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(ValueError, match=f"{path.name} is not as it was saved"):
            read_checkpoint(folder, config)
        path.write_bytes(kept)
    read_checkpoint(folder, config)


def test_a_checkpoint_saved_before_there_were_digests_is_resumed(
    tmp_path: Path, config: RunConfig
) -> None:
    folder = save(tmp_path, config, 1)
    header = json.loads((folder / "trainer.json").read_text())
    del header["digests"]
    (folder / "trainer.json").write_text(json.dumps(header))
    assert read_checkpoint(folder, config).progress.step == 1


def test_what_a_process_killed_while_saving_left_is_removed(
    tmp_path: Path, config: RunConfig
) -> None:
    (tmp_path / ".step-00000003.tmp-12345678").mkdir()
    save(tmp_path, config, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000004"]
