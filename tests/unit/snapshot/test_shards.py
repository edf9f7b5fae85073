"""Snapshots that several processes write at once, and copies of what is written."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import families
import runs
from small_snapshots import TOKENIZER, state_at, trained
from snapshot.disk import save, tensor_files
from snapshot.disk.folder import verify
from snapshot.disk.save import Snapshot, Writers
from snapshot.disk.tensor_files import TensorFile, create_files, plan_files
from snapshot.errors import NumberFault
from training.run.writer import writers_of

SCRIPT = runs.ROOT / "tests" / "support" / "sharded.py"


def launched(folder, *words, config="fsdp_cpu.yaml", processes=2, script=SCRIPT, code=0, **changes):
    """A run of sharded.py, or another script, that ends with this code."""
    file = runs.rehearsal(config, folder, processes, **changes)
    return runs.run(runs.launch_command(file, *words, script=script), code=code)


def assert_as_one_process_writes(run_dir: Path, steps: tuple[int, ...]) -> None:
    """The bytes of each file of tensors are those of the gathered way, and those of save_file."""
    for step in steps:
        folder = runs.snapshot(run_dir, step)
        verify(folder)
        files = sorted(path.name for path in folder.glob("*.safetensors*"))
        assert len(files) >= 2
        for name in files:
            content = (folder / name).read_bytes()
            assert content == (run_dir / "gathered" / folder.name / name).read_bytes(), name
            if name.endswith(".safetensors"):
                save_file(load_file(folder / name), run_dir / "one", metadata={"format": "pt"})
                assert content == (run_dir / "one").read_bytes(), name


def slow(*row: object) -> object:
    return pytest.param(*row, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("config", "processes", "family", "more"),
    [
        ("fsdp_cpu.yaml", 2, None, ()),
        slow("fsdp_cpu.yaml", 3, None, ()),
        slow("fsdp_hybrid.yaml", 4, None, ()),
        slow("fsdp_offload.yaml", 2, None, ()),
        slow("tp_cpu.yaml", 2, None, ()),
        pytest.param("fsdp_tp_cpu.yaml", 4, None, (), marks=pytest.mark.thorough),
        slow("fsdp_cpu.yaml", 2, "mixtral", ()),  # its experts are converted
        slow("fsdp_cpu.yaml", 2, "llama tied", ("model.lora_rank=4",)),
        slow("fsdp_cpu.yaml", 2, "gpt2", ()),
    ],
)
def test_what_all_write_is_byte_for_byte_what_one_process_writes(
    small, tmp_path, config, processes, family, more
):
    """Also in pieces, where shards have different sizes, and where copies are written."""
    changes = {"parallelism_config_dp_shard_size": 2} if "hybrid" in config else {}
    words = [*small, "train.max_steps=4", "snapshot.every=2", *more, f"run.dir={tmp_path / 'run'}"]
    if family is None:
        words += ["model.n_embd=144", "train.global_batch_size=12", "snapshot.piece_bytes=1000000"]
    else:
        base = families.make(family, tmp_path / "base", dtype="bfloat16")
        words = [word for word in words if not word.startswith("model.n_")]
        words.append(f"model.pretrained={base}")
    result = launched(tmp_path, "twice", *words, config=config, processes=processes, **changes)
    assert f"{processes} processes, CPU" in result.stdout
    assert_as_one_process_writes(tmp_path / "run", (2, 4))
    names = {path.name for path in (tmp_path / "run" / "snapshots").iterdir()}
    assert names == {"step-00000002", "step-00000004"}


@pytest.mark.thorough
def test_a_process_killed_while_writing_leaves_no_snapshot(small, tmp_path):
    result = launched(tmp_path, "dies", *small, f"run.dir={tmp_path / 'run'}", code=1)
    assert re.search(r"exitcode +: -9", result.stderr), result.stderr
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == ["step-00000010"]
    verify(runs.snapshot(tmp_path / "run", 10))


@pytest.mark.parametrize("what", [pytest.param("full", marks=pytest.mark.thorough), "full at once"])
def test_a_full_disk_under_one_writer_costs_one_snapshot(small, tmp_path, what):
    """The other process learns of it, and does not wait for the first in the next snapshot."""
    words = [*small, "run.collective_timeout_seconds=60", f"run.dir={tmp_path / 'run'}"]
    result = launched(tmp_path, what, *words)
    said = "warning: the snapshot of step 20 could not be written: [Errno 28] No space left"
    assert result.stdout.count(said) == 1
    names = sorted(path.name for path in (tmp_path / "run" / "snapshots").iterdir())
    assert names == ["step-00000010", "step-00000030"]
    verify(runs.snapshot(tmp_path / "run", 30))


@pytest.mark.parametrize("under_fsdp", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_updates_before_a_snapshot_is_written_do_not_change_it(
    small, finished_run, tmp_path, under_fsdp
):
    undisturbed, words = finished_run, [*small, "model.dropout=0.1"]
    late = ["lags", *words, f"run.dir={tmp_path}/run"]
    if under_fsdp:
        undisturbed = tmp_path / "at once"
        launched(tmp_path, *words, f"run.dir={undisturbed}", script=runs.ROOT / "train.py")
        launched(tmp_path, *late, script=runs.BESIDE)
    else:
        said = runs.run(runs.command(*late, script=str(runs.BESIDE)), code=0).stdout
        assert "beside a step: [10, 20]" in said
    for step in (10, 20, 30):
        verify(runs.snapshot(tmp_path / "run", step))
        runs.assert_same_bits(
            runs.snapshot(tmp_path / "run", step), runs.snapshot(undisturbed, step)
        )


def written(folder: Path, tensors: dict[str, torch.Tensor], strips: bool) -> bytes:
    """The file that processes make, of which each has some rows and columns of each matrix."""
    folder.mkdir()
    files = plan_files({n: tuple(t.shape) for n, t in tensors.items()}, "model", 10**9)
    create_files(folder, "model", files)
    for name, tensor in tensors.items():
        cuts = [(slice(2, size), slice(0, 2)) for size in tensor.shape]
        for part in product(*cuts) if tensor.ndim > 1 and strips else [None]:
            files[0].write(folder, name, tensor if part is None else tensor[part], part)
    return (folder / "model.safetensors").read_bytes()


def test_the_bytes_of_a_file_are_those_of_save_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 1000)
    tensors = {
        "h.10.weight": torch.randn(333, 70),
        'h.2.ü"\\': torch.randn(500),
        "z.step": torch.tensor(3.0),
        "empty": torch.randn(0, 3),
        "a.transposed": torch.randn(70, 33).t(),
        "experts": torch.randn(3, 4, 50),
    }
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, tmp_path / "theirs", metadata={"format": "pt"})
    expected = (tmp_path / "theirs").read_bytes()
    for strips in (False, True):
        assert written(tmp_path / f"{strips}", tensors, strips) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_only_finite_numbers_are_written(tmp_path, monkeypatch, value):
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 1000)
    tensor = torch.full((60, 50), torch.finfo(torch.float32).max)
    assert written(tmp_path / "largest", {"a": tensor}, strips=True)
    for place in (0, 777, 2999):
        broken = tensor.clone()
        broken.view(-1)[place] = value
        with pytest.raises(NumberFault, match=f"has {value:g} in 'a'"):
            written(tmp_path / f"{place}", {"a": broken}, strips=False)


@pytest.mark.parametrize("copies", [False, True])
def test_a_failure_lets_the_update_go(tmp_path, monkeypatch, copies):
    def fail(*_) -> int:
        raise OSError(28, "No space left on device")

    if not copies:
        monkeypatch.setattr(TensorFile, "write", fail)
    snapshot = Snapshot(tmp_path, state_at(1), *trained(1), TOKENIZER.save)
    with pytest.raises(OSError, match="No space"):
        snapshot.write(fail) if copies else snapshot.write()
    snapshot.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "kind", "elsewhere"),
    [
        (OSError(28, "No space left"), OSError, "No space left"),
        (NumberFault("inf in a weight"), NumberFault, "not finite"),
        (KeyError("a mistake"), OSError, "could not write its part"),
    ],
)
def test_an_error_of_one_process_is_that_of_all(monkeypatch, error, kind, elsewhere):
    sent = []

    monkeypatch.setattr(Writers, "largest", lambda _, here: sent.append(here) or max(sent))
    one, other = (Writers(rank, "group") for rank in (0, 1))
    with pytest.raises(type(error)) as own, other.together():
        raise error
    assert own.value is error
    with pytest.raises(kind, match=elsewhere) as here, one.together():
        pass
    assert getattr(here.value, "errno", None) == getattr(error, "errno", None)
    sent.clear()
    with one.together():
        pass


@pytest.mark.parametrize(
    ("machines", "own_disks", "file_system", "shares"),
    [
        (1, False, "nfs4", True),
        (2, False, "ext4", True),
        (2, False, "nfs4", False),  # it may mix what two machines write
        (2, True, "ext4", False),
    ],
)
def test_each_writes_where_all_share_a_disk(
    tmp_path, monkeypatch, machines, own_disks, file_system, shares
):
    """Also where a link leads to that disk."""
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "run")
    mounts = [("/", "ext4"), (str(tmp_path / "disk"), file_system)]
    mounts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr(save.psutil, "disk_partitions", lambda all: mounts)
    for name, value in {
        "is_one_machine": lambda: machines == 1,
        "is_on_any": lambda _, here: here,
        "group_of_threads": lambda seconds: "group",
        "is_sharded": lambda parameter: True,
    }.items():
        monkeypatch.setattr(f"training.run.writer.{name}", value)
    accelerator = SimpleNamespace(is_main_process=True, process_index=0)
    model, root = torch.nn.Linear(1, 1), tmp_path / "out" / "snapshots"
    found = writers_of(accelerator, model, root, 1.0, own_disks)
    assert (found.group == "group") == shares
