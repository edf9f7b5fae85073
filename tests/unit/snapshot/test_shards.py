"""Snapshots that several processes write at once, and copies of what is written."""

from __future__ import annotations

import os
import re
import threading
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import families
import runs
from disks import Tmpfs, mounted
from snapshot.disk import peers, tensor_files
from snapshot.disk.files import verify
from snapshot.disk.peers import BEGUN, HASHED, WRITTEN, Peer, Peers, Progress, files_by_rank
from snapshot.disk.shards import PendingShards, Shard, StagingBuffer, shapes_of
from snapshot.disk.tensor_files import TensorFiles, create_files, plan_files
from snapshot.disk.writing import Destination, PendingSnapshot
from snapshot.errors import SnapshotError

SCRIPT = runs.ROOT / "tests" / "support" / "sharded.py"
HYBRID = {"parallelism_config_dp_shard_size": 2}
LORA = ("model.lora_rank=4",)


def launched(folder, what, *words, config="fsdp_cpu.yaml", processes=2, script=SCRIPT, **changes):
    """A run of sharded.py, or another script, to its end."""
    file = runs.rehearsal(config, folder, processes, **changes)
    return runs.run(runs.launch_command(file, what, *words, script=script))


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


SHAPES = [
    pytest.param("fsdp_cpu.yaml", 2, {}),
    pytest.param("fsdp_cpu.yaml", 3, {}, marks=pytest.mark.slow),
    pytest.param("fsdp_hybrid.yaml", 4, HYBRID, marks=pytest.mark.slow),
    pytest.param("fsdp_offload.yaml", 2, {}, marks=pytest.mark.slow),
    pytest.param("tp_cpu.yaml", 2, {}, marks=pytest.mark.slow),
    pytest.param("fsdp_tp_cpu.yaml", 4, {}, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("config", "processes", "changes"), SHAPES)
def test_what_all_write_is_byte_for_byte_what_one_process_writes(
    small, tmp_path, config, processes, changes
):
    """Also in pieces, where shards have different sizes, and where copies are written."""
    words = ["model.n_embd=144", "train.global_batch_size=12", "train.max_steps=4"]
    words += ["snapshot.every=2", "snapshot.piece_bytes=1000000", f"run.dir={tmp_path / 'run'}"]
    result = launched(
        tmp_path, "twice", *small, *words, config=config, processes=processes, **changes
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{processes} processes, CPU" in result.stdout
    assert_as_one_process_writes(tmp_path / "run", (2, 4))
    names = {path.name for path in (tmp_path / "run" / "snapshots").iterdir()}
    assert names == {"step-00000002", "step-00000004"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mixtral", ()),  # its experts are converted
        ("llama tied", LORA),
        ("gpt2", ()),
    ],
)
def test_so_it_is_for_a_model_of_the_hub(small, tmp_path, family, more):
    base = families.make(family, tmp_path / "base", dtype="bfloat16")
    own = [word for word in small if not word.startswith("model.n_")]
    words = [f"model.pretrained={base}", "train.max_steps=4", "snapshot.every=2", *more]
    result = launched(tmp_path, "twice", *own, *words, f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert_as_one_process_writes(tmp_path / "run", (2, 4))


@pytest.mark.thorough
def test_a_process_killed_while_writing_leaves_no_snapshot(small, tmp_path):
    result = launched(tmp_path, "dies", *small, f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 1
    assert re.search(r"exitcode +: -9", result.stderr), result.stderr
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == ["step-00000010"]
    verify(runs.snapshot(tmp_path / "run", 10))


@pytest.mark.thorough
def test_a_full_disk_under_one_writer_costs_one_snapshot(small, tmp_path):
    result = launched(tmp_path, "full", *small, f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stdout + result.stderr
    said = "warning: the snapshot of step 20 could not be written: [Errno 28] No space left"
    assert result.stdout.count(said) == 1
    assert f"The last good snapshot stays: {runs.snapshot(tmp_path / 'run', 10)}" in result.stdout
    names = sorted(path.name for path in (tmp_path / "run" / "snapshots").iterdir())
    assert names == ["step-00000010", "step-00000030"]
    verify(runs.snapshot(tmp_path / "run", 30))
    assert len(runs.losses(tmp_path / "run")) == 30


@pytest.mark.thorough
def test_processes_without_a_common_disk_gather_as_is_said_once(small, tmp_path):
    result = launched(tmp_path, "apart", *small, f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("the main process gathers every snapshot") == 1
    for step in (10, 20, 30):
        verify(runs.snapshot(tmp_path / "run", step))
    assert not (tmp_path / "another disk").exists()


LATE = ["model.dropout=0.1"]


def test_updates_before_a_snapshot_is_written_do_not_change_it(small, finished_run, tmp_path):
    words = runs.command("lags", *small, *LATE, f"run.dir={tmp_path}/run", script=str(runs.BESIDE))
    result = runs.run(words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "beside a step: [10, 20]" in result.stdout
    for step in (10, 20, 30):
        verify(runs.snapshot(tmp_path / "run", step))
        runs.assert_same_bits(
            runs.snapshot(tmp_path / "run", step), runs.snapshot(finished_run, step)
        )


@pytest.mark.thorough
def test_so_it_is_under_fsdp(small, tmp_path):
    for what in ("lags", "at once"):
        words = [*small, *LATE, f"run.dir={tmp_path / what}"]
        script = runs.BESIDE if what == "lags" else runs.ROOT / "train.py"
        result = launched(tmp_path, *(["lags"] if what == "lags" else []), *words, script=script)
        assert result.returncode == 0, result.stdout + result.stderr
    for step in (10, 20, 30):
        both = [runs.snapshot(tmp_path / what, step) for what in ("lags", "at once")]
        runs.assert_same_bits(*both)


def written(folder: Path, tensors: dict[str, torch.Tensor], strips: bool, maps: bool) -> bytes:
    """The file that processes make, of which each has some rows and columns of each matrix."""
    folder.mkdir()
    planned = plan_files({n: tuple(t.shape) for n, t in tensors.items()}, "model", 10**9)
    create_files(folder, "model", planned)
    with TensorFiles(folder, planned, maps) as files:
        for name, tensor in tensors.items():
            if tensor.ndim < 2 or not strips:
                files.write(name, tensor)
                continue
            cuts = [(slice(2, size), slice(0, 2)) for size in tensor.shape]
            for part in product(*cuts):
                files.write(name, tensor[part], part)
        files.flush()
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
    for strips, maps in ((False, True), (True, True), (True, False)):
        assert written(tmp_path / f"{strips} {maps}", tensors, strips, maps) == expected


def test_a_full_disk_under_a_map_is_an_error_and_no_signal(tmp_path):
    with mounted(tmp_path / "disk", lambda: Tmpfs(tmp_path / "disk")) as disk:
        planned = plan_files({"matrix": (1000, 500)}, "model", 10**9)
        create_files(disk.folder, "model", planned)
        disk.fill()
        half = (slice(0, 1000), slice(0, 250))
        with (
            TensorFiles(disk.folder, planned, True) as files,
            pytest.raises(OSError, match="28"),
        ):
            files.write("matrix", torch.randn(1000, 250), half)


def shards_of(*sizes: int) -> tuple[list[Shard], list[torch.Tensor]]:
    """Shards of so many numbers each, and their tensors."""
    tensors = [torch.full((size,), float(i)) for i, size in enumerate(sizes)]
    return [Shard({f"{i}": one}, {f"{i}": (len(one),)}) for i, one in enumerate(tensors)], tensors


def write_all(pending: PendingShards, files) -> None:
    for shard in pending:
        shard.write(files)


class Written:
    """Instead of files: what is written, each shard only when it may be."""

    def __init__(self, at_once: int) -> None:
        self.numbers: list[float] = []
        self.begun, self.allowed = threading.Event(), threading.Semaphore(at_once)

    def write(self, name, numbers, slices=None) -> None:
        self.begun.set()
        assert self.allowed.acquire(timeout=20)
        self.numbers.append(numbers[0].item())


@pytest.mark.parametrize("most", [0, 4 * 30, 10**9])
def test_an_update_waits_for_what_there_is_no_memory_to_copy(most):
    shards, tensors = shards_of(10, 10, 10, 10, 10)
    buffer = StagingBuffer(most, lambda: 10**6, pinned=False)
    buffer.begin(4 * 50)
    pending, files = PendingShards(shards, buffer), Written(at_once=0)
    writing = threading.Thread(target=write_all, args=(pending, files))
    writing.start()
    assert files.begun.wait(20)
    pending.copy()  # what there is memory for, while the first one is being written
    updated = threading.Event()

    def update() -> None:
        pending.release()
        for tensor in tensors:
            tensor.fill_(-1)
        updated.set()

    updating = threading.Thread(target=update)
    updating.start()
    waits_for = 5 if most == 0 else 2 if most == 4 * 30 else 1  # the one that is being written
    for _ in range(waits_for):
        assert not updated.is_set()
        files.allowed.release()
    assert updated.wait(20)
    for _ in range(5 - waits_for):
        files.allowed.release()
    writing.join()
    assert files.numbers == [0, 1, 2, 3, 4]
    updating.join()


def test_no_more_is_copied_than_there_is_memory_for():
    shards, _ = shards_of(10, 10, 10)
    buffer = StagingBuffer(10**9, lambda: 4 * 25, pinned=False)
    buffer.begin(4 * 30)
    assert [buffer.copy(shard) is not None for shard in shards] == [True, True, False]
    buffer.begin(4 * 30)
    assert buffer.copy(shards[0]) is not None


def test_a_failure_lets_the_update_go(tmp_path, monkeypatch):
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorFiles, "write", full)
    shards, _ = shards_of(10, 10)
    files = {"model": plan_files(shapes_of(shards), "model", 10**9)}
    snapshot = PendingSnapshot(Destination(tmp_path, 10**9), "step-00000001", files, full)
    snapshot.begin(shards)
    with pytest.raises(OSError, match="No space"):
        snapshot.write()
    snapshot.shards.release()


def both(folder: Path, pids: tuple[int, int], timeout: float = 20.0) -> list[Progress]:
    """The progress of a snapshot as each of two processes sees it."""
    writing = [Peer(rank, 0, pid) for rank, pid in enumerate(pids)]
    seen = [Progress(folder, Peers(rank, 0, list, str, timeout, writing)) for rank in (0, 1)]
    seen[0].create(3)
    return seen


def test_processes_go_together_from_one_stage_to_the_next(tmp_path):
    first, second = both(tmp_path, (os.getpid(), os.getpid()))
    assert [one["stage"] for one in first.wait_for(BEGUN)] == [BEGUN, BEGUN]
    second.reach(WRITTEN)
    second.reach(HASHED, digests={"a": "b"})
    first.reach(WRITTEN)
    assert first.wait_for(WRITTEN)[1] == {"stage": HASHED, "digests": {"a": "b"}}
    first.remove()
    assert not list(tmp_path.iterdir())


def test_a_failure_or_a_death_is_known_to_the_others_at_once(tmp_path, monkeypatch):
    here = os.getpid()
    (tmp_path / "1").mkdir()
    first, second = both(tmp_path / "1", (here, here))
    second.fail(SnapshotError("inf in a weight"))
    with pytest.raises(SnapshotError, match="inf in a weight"):
        first.wait_for(WRITTEN)
    (tmp_path / "2").mkdir()
    first, second = both(tmp_path / "2", (here, here))
    monkeypatch.setattr(
        Progress, "reach", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full"))
    )
    second.fail(OSError(28, "full"))  # not even the marker can be written
    with pytest.raises(OSError, match="process 1 could not write"):
        first.wait_for(WRITTEN)
    (tmp_path / "3").mkdir()
    first, _ = both(tmp_path / "3", (here, 2**22 + 1))
    with pytest.raises(OSError, match="process 1 is gone"):
        first.wait_for(WRITTEN)
    (tmp_path / "4").mkdir()
    first, _ = both(tmp_path / "4", (here, here), timeout=0.05)
    with pytest.raises(OSError, match=r"not written its part for 0\.05 s"):
        first.wait_for(WRITTEN)


def peers_of(
    roots: list[Path], machines: tuple[int, ...], shards: tuple[bool, ...]
) -> list[list[int]]:
    """The peers that each of several processes finds, each in a thread of its own."""
    barrier = threading.Barrier(len(roots))
    told, rows = [""], [[0]] * len(roots)
    found: list[list[int]] = [[]] * len(roots)

    def process(rank: int) -> None:
        def gather(numbers: list[int]) -> list[list[int]]:
            rows[rank] = numbers
            barrier.wait(20)
            result = list(rows)
            barrier.wait(20)
            return result

        def tell(text: str) -> str:
            if rank == 0:
                told[0] = text
            barrier.wait(20)
            result = told[0]
            barrier.wait(20)
            return result

        mine = Peers(rank, machines[rank], gather, tell, 20.0)
        mine.find(roots[rank], shards[rank])
        found[rank] = [peer.rank for peer in mine.writing]

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(len(roots))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_those_write_at_once_who_have_shards_and_a_common_disk(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    assert peers_of([here, here], (0, 0), (True, True)) == [[0, 1]] * 2
    assert peers_of([here, there], (0, 1), (True, True)) == [[], []]
    # Hybrid sharding: the second machine's replica is not written, so it needs no common disk.
    assert peers_of([here, here, there], (0, 0, 1), (True, True, False)) == [[0, 1]] * 3
    assert peers_of([here, here], (0, 1), (True, True)) == [[0, 1]] * 2
    monkeypatch.setattr(peers, "is_coherent", lambda _: False)  # a network file system
    assert peers_of([here, here], (0, 1), (True, True)) == [[], []]
    assert peers_of([here, here], (0, 0), (True, True)) == [[0, 1]] * 2
    assert not list(here.iterdir())
    assert not list(there.iterdir())


def test_files_are_shared_by_their_bytes():
    peers = [Peer(rank, 0, 0) for rank in (0, 2)]
    sizes = {"a": 5, "b": 9, "c": 5, "d": 1}
    assert files_by_rank(sizes, peers) == {0: ["b", "d"], 2: ["a", "c"]}


def test_a_network_file_system_behind_a_link_is_one(tmp_path, monkeypatch):
    network = tmp_path / "nfs"
    (network / "run").mkdir(parents=True)
    (tmp_path / "out").symlink_to(network / "run")
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4")]
    mounts.append(SimpleNamespace(mountpoint=str(network), fstype="nfs4"))
    monkeypatch.setattr(peers.psutil, "disk_partitions", lambda all: mounts)
    assert peers.is_coherent(tmp_path / "snapshots")
    assert not peers.is_coherent(network / "run" / "snapshots")
    assert not peers.is_coherent(tmp_path / "out" / "snapshots")
