"""The seams: an optimizer or a schedule that somebody adds works in all places, or is refused."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise

import pytest
import torch

from config.compose import load_config
from config.schema import ConfigError, OptimConfig
from data.tokenizer import CharTokenizer
from model.gpt import GPT, GPTConfig
from optim.optimizers import OPTIMIZERS, decayed_groups, refusal
from optim.schedules import SCHEDULES, Schedule
from planning.allocation_log import KINDS
from planning.fake_trace import Shape, traced_phases
from snapshot.disk.architecture import layout_of
from snapshot.disk.state import RunState, begin_snapshot, check_snapshot, restore
from snapshot.errors import SnapshotError
from training.optimizer import make_optimizer
from training.schedule import last_full_step, learning_rate_at

CPU = torch.device("cpu")
SIZES = GPTConfig(vocab_size=12, block_size=8, n_layer=2, n_head=2, n_embd=8)
TOKENIZER = CharTokenizer("abcdefghijkl")
STOCK = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {},
}
"""Optimizers of torch, as somebody adds one in a line, with options."""
OTHERS = {
    "Adafactor": "keeps 'row_var' in the shape [2, 1] of a parameter in the shape [2, 3]",
    "LBFGS": "cannot update a parameter: LBFGS.step() missing 1 required positional argument",
    "SparseAdam": "cannot update a parameter: SparseAdam does not support dense gradients",
}
"""Those that are refused, and why."""


def add(monkeypatch, name: str, **options: object) -> None:
    """Add an optimizer of torch to the registry, as docs/how-the-code-is-organised.md says."""

    def build(parts, settings, device, dtype):
        stock = getattr(torch.optim, name)
        if name == "LBFGS":  # it has no groups
            return stock(list(parts))
        return stock(decayed_groups(parts, 0.0), lr=settings.learning_rate, **options)

    monkeypatch.setitem(OPTIMIZERS, name, build)


def update(model: GPT, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for one in model.parameters():
        one.grad = torch.randn(one.shape, generator=generator)
    optimizer.step()


def attempt(name: str) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = GPT(SIZES)
    return model, make_optimizer(model, OptimConfig(name=name), CPU, "no")


def save(folder, name: str, model: GPT, optimizer: torch.optim.Optimizer, step: int = 2):
    config = {"optim": asdict(OptimConfig(name=name))}
    state = RunState("a" * 32, "b" * 32, step, 0, 1, None, config, {"vocabulary": "x"})
    return begin_snapshot(
        folder, state, model, optimizer, TOKENIZER.save, writer=True, piece_bytes=10**9
    )()


@pytest.mark.parametrize("name", [*OPTIMIZERS, *STOCK])
def test_every_optimizer_resumes_as_if_nothing_happened(monkeypatch, tmp_path, name):
    """Those of the registry, and a stock one that is added to it: its next bits are the same."""
    if name in STOCK:
        add(monkeypatch, name, **STOCK[name])
    config = load_config([f"optim.name={name}"])
    assert config.optim.name == name
    model, optimizer = attempt(name)
    for step in (1, 2):
        update(model, optimizer, step)
    folder = save(tmp_path, name, model, optimizer)
    assert check_snapshot(folder).step == 2
    resumed, its_optimizer = attempt(name)
    restore(folder, resumed, its_optimizer)
    for before, after in ((model, optimizer), (resumed, its_optimizer)):
        update(before, after, 3)
        update(before, after, 4)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Adagrad", "SGD"])
def test_plans_count_what_every_optimizer_keeps(monkeypatch, name):
    if name in STOCK:
        add(monkeypatch, name)
    model, optimizer = attempt(name)
    update(model, optimizer, 1)
    kept = [one for state in optimizer.state.values() for one in state.values()]
    weights = sum(one.nbytes for one in model.parameters())
    moments = sum(one.nbytes for one in kept if one.dim())
    assert layout_of(model).snapshot_bytes(name, False) == weights + moments
    traced = traced_phases(SIZES, 1, Shape("cpu", "no", optimizer=name)).log.totals()
    assert traced[:, KINDS.index("optimizer")].max() == sum(one.nbytes for one in kept)


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_that_cannot_be_resumed_is_refused_at_the_start(monkeypatch, name):
    add(monkeypatch, name)
    with pytest.raises(ConfigError) as raised:
        load_config([f"optim.name={name}"])
    assert f"optim.name={name} cannot be used: it {OTHERS[name]}" in str(raised.value)


def test_settings_that_change_what_is_kept_are_refused_at_the_start(monkeypatch):
    def build(parts, settings, device, dtype):
        return torch.optim.SGD(decayed_groups(parts, 0.0), momentum=settings.betas[0])

    monkeypatch.setitem(OPTIMIZERS, "momentum", build)
    assert refusal("momentum", OptimConfig()) is None
    with pytest.raises(ConfigError, match="keeps nothing of a parameter with these settings, and"):
        load_config(["optim.name=momentum", "optim.betas=[0,0.9]"])


def test_an_optimizer_that_the_program_does_not_know_is_no_snapshot_s(monkeypatch, tmp_path):
    with monkeypatch.context() as added:
        add(added, "Adagrad")
        model, optimizer = attempt("Adagrad")
        update(model, optimizer, 1)
        folder = save(tmp_path, "Adagrad", model, optimizer)
    with pytest.raises(SnapshotError, match=r"optim\.name=Adagrad is not adamw or muon"):
        check_snapshot(folder)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_the_loss_does_not_depend_on_is_named_at_the_first_update(name):
    model, optimizer = attempt(name)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    model(ids, ids).backward()
    model.transformer.h[1].mlp.c_fc.bias.grad = None
    with pytest.raises(ConfigError, match=r"transformer\.h\.1\.mlp\.c_fc\.bias has no gradient"):
        optimizer.step()


def test_before_the_first_update_there_is_no_snapshot(tmp_path):
    """fp16's loss scaler may skip it."""
    with pytest.raises(SnapshotError, match=r"the optimizer has not updated transformer\.wte"):
        save(tmp_path, "adamw", *attempt("adamw"))


@pytest.mark.parametrize("name", [*SCHEDULES, "linear"])
def test_every_schedule_warms_up_and_falls_to_the_lowest_rate(monkeypatch, name):
    """Those of the registry, and one that is added to it."""
    if name == "linear":
        monkeypatch.setitem(SCHEDULES, "linear", Schedule(lambda progress: 1 - progress))
    load_config([f"optim.schedule={name}"])
    optim = OptimConfig(1.0, 0.1, warmup_steps=10, schedule=name)
    rates = [learning_rate_at(step, optim, 100) for step in range(1, 101)]
    full = last_full_step(optim, 100)
    assert rates[:10] == [step / 10 for step in range(1, 11)]
    assert set(rates[9:full]) == {1.0}
    assert all(one > other for one, other in pairwise(rates[full - 1 :]))
    assert rates[-1] == pytest.approx(0.1)
    if name == "linear":
        assert rates[54] == pytest.approx(0.55)


def test_an_unknown_schedule_is_an_error_and_no_other_one():
    with pytest.raises(ConfigError, match=r"optim\.schedule=linear must be cosine or wsd"):
        learning_rate_at(50, OptimConfig(schedule="linear"), 100)
