"""How a CPU computes attention: measured once, equal on all processes, kept by every restart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

import runs
import training.run.tuning
from config.compose import load_config
from config.schema import gpt_config
from model.cpu.layers import KERNEL, PRODUCTS, measure
from model.gpt import GPT
from snapshot.disk.files import read_json
from training.run.tuning import choose_attention

SHORT = [
    "train.max_steps=4",
    "snapshot.every=2",
    "snapshot.keep=4",
    "train.eval_every=4",
]


class Machine:
    """A machine on which a test decides how fast each way is."""

    def __init__(self, monkeypatch, words: list[str]) -> None:
        self.seconds = {PRODUCTS: 0.010, KERNEL: 0.002}
        self.measured = 0
        self.words = words
        monkeypatch.setattr(training.run.tuning, "measure", self._measure)

    def _measure(self, *_: object) -> dict[str, float]:
        self.measured += 1
        return self.seconds

    def choice(self, *words: str, step: int = 0, before: str | None = None) -> str | None:
        """The choice of an attempt."""
        config = load_config([*self.words, *words])
        model = GPT(gpt_config(config, 31))
        state = SimpleNamespace(attention=before, step=step)
        choose_attention(Accelerator(cpu=True), config, model, state)
        return state.attention


@pytest.fixture
def machine(monkeypatch, small, tmp_path) -> Machine:
    return Machine(monkeypatch, [*small, f"data.cache_dir={tmp_path / 'cache'}"])


@pytest.mark.parametrize(("kernel_ms", "way"), [(2, KERNEL), (8.6, KERNEL), (8.8, PRODUCTS)])
def test_what_is_usually_slower_must_be_clearly_faster(machine, kernel_ms, way):
    machine.seconds[KERNEL] = kernel_ms / 1e3
    assert machine.choice() == way


def test_each_shape_is_measured_once_on_a_machine(machine):
    assert machine.choice() == KERNEL
    machine.seconds[KERNEL] = 1.0
    assert [machine.choice(), machine.choice("optim.weight_decay=0")] == [KERNEL, KERNEL]
    assert machine.measured == 1
    assert machine.choice("model.n_head=4") == PRODUCTS
    assert machine.measured == 2


def test_a_damaged_measurement_is_made_again(machine, tmp_path):
    machine.choice()
    (path,) = (tmp_path / "cache").glob("attention-*.json")
    for content in ("", "[]", "{}", '{"way": "faster"}'):
        path.write_text(content)
        assert machine.choice() == KERNEL
    assert machine.measured == 5


def test_a_resumed_run_keeps_its_choice(machine):
    assert machine.choice(step=10, before=PRODUCTS) == PRODUCTS
    assert machine.choice(step=10, before=None) is None  # a snapshot of an older version
    assert machine.choice("run.attention=kernel", step=10, before=PRODUCTS) == KERNEL
    assert machine.measured == 0


def test_long_sequences_are_left_to_torchs_kernel(machine):
    assert machine.choice("data.block_size=513") is None
    assert machine.choice("data.block_size=513", "run.attention=products") == PRODUCTS
    assert machine.measured == 0


def test_the_measurement_draws_nothing_and_keeps_the_threads():
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    seconds = measure(torch.randn(2, 3, 16, 8), 0.1)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert all(0 < value < 10 for value in seconds.values())


def test_a_resume_keeps_the_bits_on_another_processor(small, tmp_path):
    """Two processes; only the first one measures."""
    config = runs.rehearsal("ddp_cpu.yaml", tmp_path, 2)

    def train(name: str, cache: str) -> Path:
        words = [f"run.dir={tmp_path / name}", f"data.cache_dir={tmp_path / cache}"]
        assert runs.launch(config, *small, *SHORT, *words).returncode == 0
        return tmp_path / name

    undisturbed = train("undisturbed", "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    (remembered,) = (tmp_path / "second").glob("attention-*.json")
    content = json.loads(remembered.read_text())
    other = {KERNEL: PRODUCTS, PRODUCTS: KERNEL}[content["way"]]
    remembered.write_text(json.dumps(content | {"way": other}))

    shutil.copytree(undisturbed, tmp_path / "moved")
    shutil.rmtree(runs.snapshot(tmp_path / "moved", 4))
    moved, fresh = train("moved", "second"), train("fresh", "second")

    ways = [read_json(runs.snapshot(run, 4) / "state.json")["attention"] for run in (moved, fresh)]
    assert ways == [content["way"], other]
    runs.assert_same_bits(runs.snapshot(undisturbed, 4), runs.snapshot(moved, 4))
    bits = [runs.tensors(runs.snapshot(run, 4)) for run in (undisturbed, fresh)]
    assert not all(bits[0][name].equal(bits[1][name]) for name in bits[0])
