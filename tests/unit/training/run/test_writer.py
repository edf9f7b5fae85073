"""Snapshots beside the step that follows them, and the memory that this takes."""

from __future__ import annotations

import re
import shutil
import threading
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import Accelerator

import runs
from config.compose import load_config
from config.schema import ConfigError
from data.tokenizer import CharTokenizer
from model.gpt import GPT, GPTConfig
from small_snapshots import state_at
from snapshot.disk.folder import verify
from snapshot.disk.tensors import Part
from snapshot.start import Start
from store.attempt import Best
from training.exits import TrainingStopped
from training.memory import available_memory
from training.reporting.console import Console
from training.reporting.metrics import MetricsFile
from training.reporting.report import Report
from training.run.records import BestSnapshot
from training.run.session import Session
from training.run.writer import SnapshotWriter
from training.step import make_optimizer


@pytest.mark.parametrize(
    ("config", "processes"),
    [
        pytest.param("cpu.yaml", 1, marks=pytest.mark.slow),
        ("ddp_cpu.yaml", 2),
        pytest.param("fsdp_cpu.yaml", 2, marks=pytest.mark.slow),
    ],
)
def test_only_the_update_waits_for_a_snapshot(small, tmp_path, config, processes):
    overrides = [*small, "model.dropout=0.1", "train.micro_batch_size=2", f"run.dir={tmp_path}/run"]
    file = runs.rehearsal(config, tmp_path, processes)
    words = runs.launch_command(file, "goes_on", *overrides, script=runs.BESIDE)
    result = runs.run(words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{processes} process" in result.stdout
    assert "beside a step: [10, 20]" in result.stdout
    for step in (10, 20, 30):
        verify(runs.snapshot(tmp_path / "run", step))


@pytest.mark.thorough
def test_a_failing_step_leaves_the_snapshot_before_it_whole(small, tmp_path):
    words = runs.command("fails", *small, f"run.dir={tmp_path / 'run'}", script=str(runs.BESIDE))
    result = runs.run(words)
    assert result.returncode == 1
    assert "ArithmeticError: in the step beside a snapshot" in result.stderr
    verify(runs.snapshot(tmp_path / "run", 10))
    assert runs.newest_step(tmp_path / "run") == 10


@pytest.mark.thorough
def test_a_dying_process_leaves_the_snapshot_before_it_whole(small, tmp_path):
    """The launcher tells the main process to end, while that still writes."""
    file = runs.rehearsal("ddp_cpu.yaml", tmp_path, 2)
    words = ["dies", *small, f"run.dir={tmp_path / 'run'}"]
    result = runs.run(runs.launch_command(file, *words, script=runs.BESIDE))
    assert result.returncode == 1
    assert re.search(r"exitcode +: 9", result.stderr), result.stderr
    verify(runs.snapshot(tmp_path / "run", 10))
    assert runs.newest_step(tmp_path / "run") == 10


class Trained:
    """A model after a step, on this process alone, and where its snapshots go."""

    def __init__(self, folder: Path, save_tokenizer) -> None:
        config = load_config([f"run.dir={folder}", "hub.repo_id=null", "optim.name=adamw"])
        model = GPT(GPTConfig(7, 6, 2, 2, 8))
        optimizer = make_optimizer(model, config.optim, torch.device("cpu"), "no")
        ids = torch.randint(7, (2, 6))
        model(ids, ids).backward()
        optimizer.step()
        self.report = Report(Console(True, 10, 0), tokens_per_step=64, last_snapshot=None)
        tokenizer = CharTokenizer("abcdefg")
        tokenizer.save = save_tokenizer
        self.saving = SnapshotWriter(
            Accelerator(cpu=True), config, model, optimizer, tokenizer, self.report
        )

    def begin(self, step: int = 3, last: bool = False) -> None:
        """The snapshot of a step."""
        self.saving.begin(state_at(step), end=last)

    def finish(self) -> None:
        """The update after it, when the writing has ended."""
        if self.saving.written is not None:
            wait([self.saving.written])
        self.saving.finish()


def refuse(_: Path) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_refuses_is_said_once_and_the_run_goes_on(tmp_path, capsys):
    trained = Trained(tmp_path, refuse)
    trained.begin()
    trained.finish()
    trained.finish()
    said = capsys.readouterr().out
    assert said.count("the snapshot of step 3 could not be written: [Errno 28]") == 1
    assert "There is no snapshot yet. Training continues; the next is tried." in said
    assert trained.report.last_snapshot is None
    assert not list((tmp_path / "snapshots").iterdir())


def test_after_a_snapshot_a_failed_one_holds_nothing_up(tmp_path, capsys):
    trained = Trained(tmp_path, CharTokenizer("abcdefg").save)
    trained.begin()
    trained.finish()
    shutil.rmtree(tmp_path / "snapshots")
    (tmp_path / "snapshots").write_text("no folder")
    trained.begin()
    trained.finish()
    assert "the snapshot of step 3 could not be written: [Errno 17]" in capsys.readouterr().out


def test_a_snapshot_is_copied_without_more_openmp_threads(tmp_path):
    """With more of them than cores, libgomp slows each later step."""
    of_training = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trained = Trained(tmp_path, CharTokenizer("abcdefg").save)
        assert trained.saving._thread.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(of_training)


def test_released_weights_may_be_exchanged_while_a_snapshot_is_written(tmp_path, monkeypatch):
    """As for an evaluation with averaged ones."""
    trained, is_zero = Trained(tmp_path, CharTokenizer("abcdefg").save), threading.Event()
    write, weight = Part.write, trained.saving._model.transformer.ln_f.weight
    before = weight.detach().clone()

    def write_late(part: Part, *where) -> None:
        assert trained.saving._snapshot._released.is_set()  # it is a copy
        assert is_zero.wait(20)
        write(part, *where)

    monkeypatch.setattr(Part, "write", write_late)
    session = Session.__new__(Session)
    session._writer = trained.saving
    session.report = trained.report
    session._timeouts = SimpleNamespace(relax=lambda: None)
    trained.begin()
    session.release_weights()
    weight.data.zero_()
    is_zero.set()
    trained.finish()
    assert runs.tensors(runs.snapshot(tmp_path, 3))["transformer.ln_f.weight"].equal(before)


def test_a_mistake_in_the_writing_is_not_taken_for_a_full_disk(tmp_path):
    def mistaken(_: Path) -> None:
        raise KeyError("a mistake")

    trained = Trained(tmp_path, mistaken)
    trained.begin()
    with pytest.raises(KeyError, match="a mistake"):
        trained.finish()


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq", None])
def test_numbers_of_no_use_are_not_written_over_good_snapshots(tmp_path, capsys, moment):
    trained = Trained(tmp_path, CharTokenizer("abcdefg").save)
    trained.begin()
    trained.finish()
    good = trained.report.last_snapshot
    parameter, held = next(iter(trained.saving._optimizer.state.items()))
    with torch.no_grad():
        (parameter if moment is None else held[moment])[0, 0] = float("inf")
    trained.begin(4)
    trained.finish()
    said = capsys.readouterr().out
    assert "the snapshot of step 4 could not be written: " in said
    assert "has inf in 'transformer.wte.weight" in said
    assert f"The last good snapshot stays: {good}. Training continues" in said
    with pytest.raises(TrainingStopped, match=r"A lower optim\.learning_rate"):
        trained.begin(5, last=True)
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == [good.name]


@pytest.mark.parametrize(("number", "remedy"), [(28, r" Free some space .*"), (13, "")])
def test_only_a_full_disk_calls_for_space(tmp_path, number, remedy):
    def refuse(_: Path) -> None:
        raise OSError(number, "refused")

    with pytest.raises(TrainingStopped, match=rf"refused\. There is no snapshot yet\.{remedy}$"):
        Trained(tmp_path, refuse).begin(3, last=True)


def frozen_now(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    model.transformer.wpe.weight.requires_grad_(False)


def left_out(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[model.transformer.wpe.weight]


def added(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(()))]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (frozen_now, r"wpe\.weight\. .* Name what is frozen in optim\.freeze"),
        (left_out, r"not updated transformer\.wpe\.weight yet\. .* x \+ 0 \* layer\(x\)"),
        (added, r"updates other parameters than the model trains: one that the model lacks"),
    ],
)
def test_a_first_update_of_other_parameters_is_refused(tmp_path, change, words):
    saving = Trained(tmp_path, CharTokenizer("abcdefg").save).saving
    saving.check_update(1)
    change(saving._model, saving._optimizer)
    with pytest.raises(ConfigError, match=f"after step 1, .*{words}"):
        saving.check_update(1)
    saving._accelerator.scaler = object()  # fp16's, which may have skipped the update
    saving.check_update(1)


def test_only_numbers_of_no_use_call_for_a_lower_rate(tmp_path):
    trained = Trained(tmp_path, CharTokenizer("abcdefg").save)
    trained.saving._optimizer.state.clear()  # as where fp16's loss scaler has skipped all updates
    with pytest.raises(TrainingStopped, match=r"not updated transformer\.wte.* no snapshot yet\.$"):
        trained.begin(3, last=True)


def control_group(root: Path, lines: str, group: str, **files: str) -> Path:
    """A system that says its processes are in a control group with these files."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(lines)
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(content)
    return root


def test_the_memory_left_is_that_of_the_control_group(tmp_path):
    machine = psutil.virtual_memory().available
    nothing = available_memory(root=tmp_path / "no Linux")
    assert nothing == pytest.approx(machine, rel=0.2)
    current = {"current": "900\n", "stat": "anon 500\ninactive_file 300\nactive_file 50\n"}
    second = control_group(tmp_path / "2", "0::/job/step\n", "job", max="1000\n", **current)
    control_group(second, "0::/job/step\n", "job/step", max="max\n", **current)
    assert available_memory(root=second) == 1000 - 900 + 300 + 50
    first = control_group(
        tmp_path / "1",
        "4:memory:/docker/1234\n3:cpuset:/\n0::/\n",
        "memory",  # of a container that sees its own group as the root
        limit_in_bytes="5000\n",
        usage_in_bytes="2000\n",
        stat="inactive_file 7\ntotal_inactive_file 500\nactive_file 9\ntotal_active_file 20\n",
    )
    assert available_memory(root=first) == 5000 - 2000 + 500 + 20
    unlimited = control_group(tmp_path / "0", "0::/\n", "", max="max\n", **current)
    assert available_memory(root=unlimited) == pytest.approx(machine, rel=0.2)


def test_the_best_is_the_snapshot_with_the_least_loss_on_this_disk_or_in_the_store(tmp_path):
    config = load_config([f"run.dir={tmp_path}", "snapshot.keep_best=true"])
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    metrics.append([{"event": "eval", "step": step, "loss": 2.0 - step / 10} for step in (1, 2)])
    metrics.flush()
    for step in (1, 3, 4):  # that of step 2 is gone
        (tmp_path / "snapshots" / f"step-{step:08d}").mkdir(parents=True)
    state = state_at(3)
    best = BestSnapshot(config, state, Start(None, None, ""))
    assert best.newest == Best(1, 1.9)
    best.evaluated(3, 0.5)
    best.evaluated(5, 0.1)  # its snapshot is not there, or not yet
    assert best.newest == Best(3, 0.5)
    latest = SimpleNamespace(run_id=state.run_id, best_step=7, best_loss=0.2)
    contents = SimpleNamespace(latest=latest)
    best = BestSnapshot(config, state, Start(None, None, "", contents=contents))
    assert best.newest == Best(7, 0.2)
