"""Every kind of model does all that model/family.py asks; the presets that transformers builds."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config.compose import load_config
from config.schema import OptimConfig, gpt_config
from data.tokenizer import CharTokenizer
from model import families
from model.causal_lm import CausalLMConfig
from model.families import ARCHITECTURES, build_empty, build_model
from model.family import parameter_count
from model.generate import generate
from model.gpt import GPTConfig
from small_snapshots import state_at
from snapshot.disk.folder import read_json
from snapshot.disk.model import check_described, layout_for, model_config
from snapshot.disk.save import Snapshot
from snapshot.disk.state import RunState
from snapshot.errors import SnapshotError
from snapshot.named_model import open_base
from training.run.session import Session
from training.step import make_optimizer

TOKENIZER = CharTokenizer("abcdefghijklmnop")
SMALL = {
    "vocab_size": 16,
    "max_position_embeddings": 12,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PRESET = read_json(ARCHITECTURES["llama_tiny"] / "config.json")
SIZES = {
    "gpt2": GPTConfig(16, 12, 2, 4, 16),
    "llama": model_config({**PRESET, **SMALL}, "it"),
    "qwen3": model_config({**SMALL, "model_type": "qwen3", "head_dim": 4}, "it"),
}
"""A small model of each kind."""
EACH = pytest.mark.parametrize("name", SIZES)
IDS = torch.randint(16, (3, 12), generator=torch.Generator().manual_seed(1))


def made(name: str, **changes: object):
    torch.manual_seed(2)
    return build_model(replace(SIZES[name], **changes))


def attempt(name: str):
    model = made(name)
    return model, make_optimizer(model, OptimConfig(name="muon"), torch.device("cpu"), "no")


def update(model, optimizer, ids=IDS) -> float:
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save(root, model, optimizer, step: int):
    state = state_at(step, name="muon")
    return Snapshot(root, state, model, optimizer, TOKENIZER.save).write()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By family, a model after an update and its snapshot."""
    found = {}
    for name in SIZES:
        model, optimizer = attempt(name)
        update(model, optimizer)
        found[name] = model, optimizer, save(tmp_path_factory.mktemp(name), model, optimizer, 1)
    return found


@EACH
def test_transformers_computes_the_same_logits_and_gradients(saved, name):
    model, _, folder = saved[name]
    theirs, loading = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(loading[what] for what in ("missing_keys", "unexpected_keys"))
    model.eval()
    torch.testing.assert_close(model(IDS), theirs(IDS).logits, rtol=0, atol=1e-5)
    model(IDS[:, :-1], IDS[:, 1:]).backward()
    theirs(IDS, labels=IDS).loss.backward()
    layout = model.layout()
    written = dict(theirs.named_parameters())
    for key, parameter in layout.parameters().items():
        gradient = parameter.grad.t() if layout.is_transposed(key) else parameter.grad
        torch.testing.assert_close(gradient, written[key].grad, rtol=1e-4, atol=1e-6)
    model.zero_grad()


@EACH
def test_its_config_json_describes_its_tensors(name):
    check_described(layout_for(SIZES[name]))
    one = SIZES[name].with_layers(1)
    assert len(build_model(one).blocks) == one.n_layer == 1
    if name == "gpt2":
        described = AutoConfig.for_model(**SIZES[name].config_json())
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(described)
        shapes = {key: tuple(one.shape) for key, one in theirs.named_parameters()}
        assert shapes == SIZES[name].tensors()


@EACH
def test_text_is_generated_with_a_cache_as_without(name):
    model = made(name)
    tokens = torch.stack([*generate(model, IDS[:1, :3], 14, temperature=0)], dim=1)
    text = IDS[:1, :3]
    model.eval()
    with torch.no_grad():
        for _ in range(14):
            text = torch.cat([text, model(text[:, -12:])[:, -1:].argmax(-1)], dim=1)
    assert tokens.equal(text[:, 3:])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_run_keeps_how_many_documents_a_row_holds(name):
    def rows_of(step: int, rows: str | None) -> str | None:
        session = Session.__new__(Session)
        data = {"vocabulary": 7, "fingerprint": "f"}
        session.state = RunState("a" * 32, "b" * 32, step, 0, 1, None, {}, data, rows=rows)
        assert session.packs(made(name)) == (session.state.rows == "several")
        return session.state.rows

    assert rows_of(0, None) == rows_of(3, "several") == "several"
    assert rows_of(3, "one") == "one"


def test_every_size_of_our_gpt_is_a_key():
    config = load_config(["model.n_layer=3"])
    sizes = gpt_config(config, 16)
    assert sizes.n_layer == 3
    given = {"vocab_size", "block_size", "lora"} | {"n_kv_head", "head_size", "can_pack"}
    assert {one.name for one in fields(sizes)} - given <= vars(config.model).keys()


def test_a_family_reads_its_config_json_before_transformers_does(monkeypatch):
    class Mine(GPTConfig):
        family = "mine"

    content = {**SIZES["gpt2"].config_json(), "model_type": "mine"}
    with pytest.raises(SnapshotError, match="does not know its model_type 'mine'"):
        model_config(content, "it")
    monkeypatch.setattr(families, "FAMILIES", (Mine, *families.FAMILIES))
    assert type(model_config(content, "it")) is Mine
    assert type(model_config(SIZES["gpt2"].config_json(), "it")) is GPTConfig


@pytest.mark.parametrize(("preset", "size"), [("llama_tiny", 861_440), ("llama_124m", 85_003_776)])
def test_a_preset_has_the_sizes_of_the_gpt_beside_it(monkeypatch, tmp_path, preset, size):
    monkeypatch.chdir(tmp_path)
    (tmp_path / preset).mkdir()  # a folder of this name is not what the preset names
    config = load_config([f"model={preset}"])
    beside = load_config([f"model={'tiny' if preset == 'llama_tiny' else 'gpt2'}"])
    assert config.data.tokenizer == beside.data.tokenizer == "char"
    assert config.optim == beside.optim
    assert config.train.max_steps == beside.train.max_steps
    base = open_base("model.architecture", preset, 1.0, False)
    base = base.on_text(65, 64, 0)
    sizes = base.config(0.0, False)
    assert isinstance(sizes, CausalLMConfig)
    assert (sizes.vocab_size, sizes.block_size, sizes.content["eos_token_id"]) == (65, 64, 0)
    ours = gpt_config(beside, 65)
    assert all(getattr(sizes, key) == getattr(ours, key) for key in ("n_layer", "n_head", "n_embd"))
    assert parameter_count(build_empty(sizes)) == size
