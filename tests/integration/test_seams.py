"""The seams: a change by a new contributor works in all places, or is refused at the start."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from config.compose import load_config
from config.help import PRESETS
from config.schema import Config, ConfigError, OptimConfig, gpt_config
from data.tokenizer import CharTokenizer
from model.gpt import GPT, MLP, GPTConfig
from optim.optimizers import OPTIMIZERS, Kind, decayed_groups
from optim.schedules import SCHEDULES, Schedule
from planning.allocation_log import KINDS
from planning.fake_trace import Shape, traced_update
from proving import logits
from proving.logits import compare_logits, why_not_comparable
from small_snapshots import state_at
from snapshot.disk.checking import check_model, check_snapshot
from snapshot.disk.folder import read_json
from snapshot.disk.load import restore
from snapshot.disk.model import ADAPTERS, check_described, layout_for, model_config
from snapshot.disk.save import Snapshot
from snapshot.disk.tensors import snapshot_bytes
from snapshot.errors import SnapshotError, Unresumable
from training.step import learning_rate_at, make_optimizer, set_learning_rate

CPU = torch.device("cpu")
SIZES = GPTConfig(vocab_size=12, block_size=8, n_layer=2, n_head=2, n_embd=8)
TOKENIZER = CharTokenizer("abcdefghijkl")
STOCK = {
    "Adagrad": Kind(None, ("sum",)),
    "NAdam": Kind(None, ("exp_avg", "exp_avg_sq"), ("step", "mu_product")),
    "RMSprop": Kind(None, ("square_avg",)),
    "SGD": Kind(None, (), ()),
}
"""Optimizers of torch, as somebody adds one in a line, and what each keeps."""


def add(monkeypatch, name: str, kind: Kind, build=None) -> None:
    """Add an optimizer to the registry, as docs/how-the-code-is-organised.md says."""

    def of_torch(parts, settings, device, dtype):
        return getattr(torch.optim, name)(decayed_groups(parts, 0.0), lr=settings.learning_rate)

    monkeypatch.setitem(OPTIMIZERS, name, replace(kind, build=build or of_torch))


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
    state = state_at(step, name=name)
    return Snapshot(folder, state, model, optimizer, TOKENIZER.save).write()


@pytest.mark.parametrize("name", [*OPTIMIZERS, *STOCK])
def test_every_optimizer_resumes_as_if_nothing_happened(monkeypatch, tmp_path, name):
    """Those of the registry, and a stock one that is added to it: its next bits are the same."""
    if name in STOCK:
        add(monkeypatch, name, STOCK[name])
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
        add(monkeypatch, name, STOCK[name])
    model, optimizer = attempt(name)
    update(model, optimizer, 1)
    kept = [one for state in optimizer.state.values() for one in state.values()]
    weights = sum(one.nbytes for one in model.parameters())
    moments = sum(one.nbytes for one in kept if one.dim())
    assert snapshot_bytes(model.layout(), name) == weights + moments
    traced = traced_update(SIZES, 1, Shape("cpu", "no", optimizer=name)).totals()
    assert traced[:, KINDS.index("optimizer")].max() == sum(one.nbytes for one in kept)


WRONG = {
    "another name": (Kind(None, ("momentum",), ()), r"keeps .*'sum': .* says {'momentum': "),
    "another shape": (Kind(None, (), ("step", "sum")), r"keeps .*'sum': \(12, 8\).* says .*"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_an_optimizer_keeps_is_its_row_of_the_registry(monkeypatch, tmp_path, wrong):
    row, words = WRONG[wrong]
    add(monkeypatch, "Adagrad", row)
    model, optimizer = attempt("Adagrad")
    update(model, optimizer, 1)
    with pytest.raises(Unresumable, match=words):
        save(tmp_path, "Adagrad", model, optimizer, 1)


def test_a_rate_of_a_group_is_refused_and_a_factor_is_used(monkeypatch):
    entry = {"lr": 0.1}

    def build(parts, settings, device, dtype):
        groups = decayed_groups(parts, 0.0)
        groups[0] |= entry
        return torch.optim.SGD(groups, lr=settings.learning_rate)

    add(monkeypatch, "own", STOCK["SGD"], build)
    with pytest.raises(ConfigError, match=r"a group the rate 0\.1, .* as its entry lr_scale\."):
        attempt("own")
    entry = {"lr_scale": 0.5}
    _, optimizer = attempt("own")
    set_learning_rate(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_a_snapshot_of_other_parameters_than_at_first_is_refused(tmp_path):
    model, optimizer = attempt("adamw")
    update(model, optimizer, 1)
    model.transformer.wpe.weight.requires_grad_(False)
    with pytest.raises(Unresumable, match=r"other parameters than the model trains: .*wpe\.weight"):
        save(tmp_path, "adamw", model, optimizer, 1)
    model.transformer.wpe.weight.requires_grad_(True)
    model.transformer.extra = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(Unresumable, match=r"other parameters than the model trains: .*extra"):
        save(tmp_path, "adamw", model, optimizer, 1)


@pytest.mark.parametrize("name", [*SCHEDULES, "linear"])
def test_every_schedule_warms_up_and_falls_to_the_lowest_rate(monkeypatch, name):
    """Those of the registry, and one that is added to it."""
    if name == "linear":
        monkeypatch.setitem(SCHEDULES, "linear", Schedule(lambda progress: 1 - progress))
    load_config([f"optim.schedule={name}"])
    optim = OptimConfig(1.0, 0.1, warmup_steps=10, schedule=name)
    rates = [learning_rate_at(step, optim, 100) for step in range(1, 101)]
    full = max(step for step, rate in enumerate(rates, start=1) if rate == 1.0)
    assert rates[:10] == [step / 10 for step in range(1, 11)]
    assert set(rates[9:full]) == {1.0}
    assert all(one > other for one, other in pairwise(rates[full - 1 :]))
    assert rates[-1] == pytest.approx(0.1)
    if name == "linear":
        assert rates[54] == pytest.approx(0.55)


def no_positions(self) -> None:
    """As rotary positions would."""
    del self.transformer.wpe


def one_more(self) -> None:
    self.transformer.h[1].attn.scale = torch.nn.Parameter(torch.ones(()))


def untied(self) -> None:
    self.lm_head.weight = torch.nn.Parameter(torch.ones(12, 8))


def narrower(self) -> None:
    self.transformer.h[0].mlp.c_fc.bias = torch.nn.Parameter(torch.ones(16))


EDITS = {
    no_positions: "has no transformer.wpe.weight",
    one_more: "has transformer.h.1.attn.scale []",
    untied: "has lm_head.weight [12, 8]",
    narrower: "has transformer.h.0.mlp.c_fc.bias [16]",
}
"""Edits of model/gpt.py that make it another model than GPT-2, and what is said of each."""


def edit(monkeypatch, change) -> None:
    original = GPT.__init__

    def edited(self, config):
        original(self, config)
        change(self)

    monkeypatch.setattr(GPT, "__init__", edited)


def check_own(config: Config) -> None:
    """What `Session.begin` checks of a model of our own."""
    check_described(layout_for(gpt_config(config, vocab_size=1)))


SMALL = ["model.n_layer=2", "model.n_head=2", "model.n_embd=8", "data.block_size=8"]


@pytest.mark.parametrize("change", EDITS)
def test_a_model_unlike_its_config_json_is_refused(monkeypatch, change):
    edit(monkeypatch, change)
    with pytest.raises(SnapshotError) as raised:
        check_own(load_config(SMALL))
    assert f"model/gpt.py {EDITS[change]}" in str(raised.value)
    assert "unlike transformers' GPT2LMHeadModel, which would load another" in str(raised.value)
    assert str(raised.value).endswith("a name of its own: GPTConfig.family in model/gpt.py")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_what_its_config_json_says(preset):
    """With each size, or sample.py would know another model than the run."""
    config = load_config([f"model={preset}"])
    if config.model.architecture is None:
        check_own(config)
        sizes = gpt_config(config, vocab_size=7)
        assert sizes.read(sizes.config_json()) == replace(sizes, dropout=0.0)


def test_a_changed_model_with_its_own_name_is_trained(monkeypatch, tmp_path):
    edit(monkeypatch, one_more)
    monkeypatch.setattr(GPTConfig, "family", "scaled_gpt")
    check_own(load_config(SMALL))
    model, optimizer = attempt("adamw")
    update(model, optimizer, 1)
    folder = save(tmp_path, "adamw", model, optimizer, step=1)
    check_snapshot(folder)
    resumed, its_optimizer = attempt("adamw")
    restore(folder, resumed, its_optimizer)
    sizes = model_config(read_json(folder / "config.json"), "it")
    assert (
        why_not_comparable(folder) == "its config.json names no class of transformers (scaled_gpt)"
    )
    with pytest.raises(ValueError, match="scaled_gpt"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert check_model(folder) == sizes
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match="not know its model_type 'scaled_gpt'"):
        check_model(folder)


def test_a_proof_compares_logits_and_says_where_it_could_not(monkeypatch, tmp_path):
    model, optimizer = attempt("adamw")
    update(model, optimizer, 1)
    saved = save(tmp_path, "adamw", model, optimizer, step=1)
    holds, _ = compare_logits(saved, is_new=True)
    assert holds
    monkeypatch.setattr(MLP, "forward", lambda self, x: self.c_proj(self.c_fc(x).relu()))
    holds, said = compare_logits(saved, is_new=True)
    assert holds is False
    assert "is another model for transformers: its logits differ" in said
    with monkeypatch.context() as absent:
        absent.setattr(logits, "find_spec", lambda name: None)
        assert why_not_comparable(saved) == "transformers is not installed"
    monkeypatch.setattr(logits, "prefix_of", lambda folder: ADAPTERS)
    holds, said = compare_logits(saved, is_new=True)
    assert holds is None
    assert "it holds adapters (LoRA)" in said
