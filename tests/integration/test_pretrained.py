"""A model of the Hub or of a folder: loaded, trained in any shape, and saved as it was."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch

import families
import hubs
import runs
from model.families import build_model
from snapshot.disk.folder import read_json
from snapshot.disk.load import restore_weights
from snapshot.disk.model import model_config

SHAPES = {
    "accumulated": ("cpu.yaml", 1, ("train.micro_batch_size=4",)),
    "DDP-2": ("ddp_cpu.yaml", 2, ()),
    "FSDP-2": ("fsdp_cpu.yaml", 2, ("train.sample_every=10",)),
}
MODELS = list(families.FAMILIES)
THOROUGH, SLOW = pytest.mark.thorough, pytest.mark.slow


def each(names, quick, others=SLOW):
    """All of them, marked if they are not quick."""
    return [pytest.param(name, marks=[] if name in quick else others) for name in names]


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    """A folder of each family, made once."""
    root = tmp_path_factory.mktemp("bases")
    return {name: families.make(name, root / name.replace(" ", "-")) for name in MODELS}


def ours(folder):
    """The model of a folder, as this project loads it."""
    path = folder / "config.json"
    model = build_model(model_config(read_json(path), str(path))).eval()
    restore_weights(folder, model)
    return model


def largest_difference(folder) -> float:
    ids = torch.randint(families.VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return (ours(folder)(ids) - families.theirs(folder)(ids).logits).abs().max().item()


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers(bases, family):
    assert largest_difference(bases[family]) < 1e-5


@pytest.mark.parametrize("family", ["llama tied", "mixtral", "gpt2"])
def test_logits_of_several_16_bit_files_are_transformers(tmp_path, family):
    folder = families.make(family, tmp_path / "base", pieces=True, dtype="bfloat16")
    assert largest_difference(folder) < 1e-5


@pytest.mark.parametrize("family", MODELS)
def test_what_is_written_has_the_names_that_transformers_writes(bases, family):
    path = bases[family] / "config.json"
    with torch.device("meta"):
        layout = build_model(model_config(read_json(path), str(path))).layout()
    written = {name: shape for one in layout.written() for name, shape in one.shapes.items()}
    from safetensors import safe_open

    with safe_open(bases[family] / "model.safetensors", "pt") as file:
        there = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert written == there


@pytest.mark.parametrize("family", each(MODELS, ["llama"]))
@THOROUGH
def test_every_shape_has_the_losses_of_one_process(small, bases, family, tmp_path):
    """And what each has saved has transformers' logits; under FSDP it ends with a sample."""
    alone = runs.train(*words(small, bases[family]), f"run.dir={tmp_path / 'alone'}")
    assert alone.returncode == 0, alone.stderr
    expected = torch.tensor(runs.losses(tmp_path / "alone"))
    for name, (config, processes, more) in SHAPES.items():
        file = runs.rehearsal(config, tmp_path, processes)
        here = f"run.dir={tmp_path / name}"
        result = runs.launch(file, *words(small, bases[family], *more, here))
        assert result.returncode == 0, result.stderr
        assert ("sample at step 10" in result.stdout) == (name == "FSDP-2")
        found = torch.tensor(runs.losses(tmp_path / name))
        assert (expected - found).abs().max() < 1e-5, name
        assert largest_difference(runs.snapshot(tmp_path / name, 10)) < 1e-5


def words(small, base, *more):
    """The overrides of a run of ten steps that begins from a model."""
    own = [word for word in small if not word.startswith("model.n_")]
    return [*own, f"model.pretrained={base}", "train.max_steps=10", "snapshot.every=5", *more]


@pytest.mark.parametrize(
    "pieces",
    [pytest.param(False, marks=THOROUGH), pytest.param(True, marks=SLOW)],
    ids=["one file", "several files"],
)
def test_a_model_of_the_hub_is_the_same_as_its_folder(small, tmp_path, hub, pieces):
    """Through the client's cache and Xet; and a run that has begun needs that repo no longer."""
    folder = families.make("qwen3", tmp_path / "base", pieces, dtype="bfloat16")
    commit = hubs.publish(hub, "them/model", folder)
    local = runs.train(*words(small, folder), f"run.dir={tmp_path / 'local'}")
    assert local.returncode == 0, local.stderr
    there = {**hub.environment(), "HF_HOME": str(tmp_path / "cache")}
    begun = words(small, "them/model", f"run.dir={tmp_path / 'run'}")
    result = runs.train(*begun, "train.max_steps=5", **there)
    assert result.returncode == 0, result.stderr
    assert f"from      them/model@{commit[:12]} (qwen3): its weights" in result.stdout
    hub.delete("them/model")
    shutil.rmtree(tmp_path / "cache")
    result = runs.train(*begun, **there)
    assert result.returncode == 0, result.stderr
    assert runs.losses(tmp_path / "run")[:5] == runs.losses(tmp_path / "local")[:5]
    state = read_json(runs.snapshot(tmp_path / "run", 10) / "state.json")
    assert state["base"] == f"them/model@{commit[:12]}"


@THOROUGH
def test_a_damaged_download_of_weights_is_made_again(small, tmp_path, hub):
    folder = families.make("llama", tmp_path / "base")
    hubs.publish(hub, "them/model", folder)
    fault = hub.fault("xorb-get", "corrupted")
    there = {**hub.environment(), "HF_HOME": str(tmp_path / "cache")}
    result = runs.train(*words(small, "them/model"), f"run.dir={tmp_path / 'run'}", **there)
    assert fault.hits
    assert result.returncode == 0, result.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    [
        *each(["llama tied", "gpt2", "mixtral"], []),
    ],
)
def test_a_run_changes_its_shape_and_keeps_its_losses(small, bases, family, tmp_path):
    """DDP to FSDP to one process and back, five steps each."""
    flat = ["optim.learning_rate=0.001", "optim.min_learning_rate=0.001"]  # whatever the last step
    more = [*flat, "train.max_steps=20", f"run.dir={tmp_path / 'alone'}"]
    result = runs.train(*words(small, bases[family], *more))
    assert result.returncode == 0, result.stderr
    for last, config, processes in (
        (5, "ddp_cpu.yaml", 2),
        (10, "fsdp_cpu.yaml", 2),
        (15, "cpu.yaml", 1),
        (20, "ddp_cpu.yaml", 2),
    ):
        more = [*flat, f"train.max_steps={last}", f"run.dir={tmp_path / 'run'}"]
        file = runs.rehearsal(config, tmp_path, processes)
        result = runs.launch(file, *words(small, bases[family], *more))
        assert result.returncode == 0, result.stderr
    expected = torch.tensor(runs.losses(tmp_path / "alone"))
    assert (torch.tensor(runs.losses(tmp_path / "run")) - expected).abs().max() < 1e-5
    assert largest_difference(runs.snapshot(tmp_path / "run", 20)) < 1e-5


def has_step(run_dir, step: int) -> bool:
    return runs.newest_step(run_dir) >= step


@pytest.mark.parametrize("family", each(["llama tied", "mixtral"], ["llama tied"]))
@THOROUGH
def test_killed_and_resumed_the_bits_are_the_same(small, bases, family, tmp_path):
    """Killed with -9 at five moments, with dropout and recomputation."""
    more = ["model.dropout=0.1", "model.activation_checkpointing=true", "train.max_steps=30"]
    command = words(small, bases[family], *more)
    whole = runs.train(*command, f"run.dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    here = runs.command(*command, f"run.dir={tmp_path / 'run'}")
    for step in (3, 6, 11, 17, 24):
        with runs.started(here) as process:
            runs.wait_until(partial(has_step, tmp_path / "run", step), process)
    result = runs.run(here)
    assert result.returncode == 0, result.stderr
    runs.assert_same_bits(
        runs.snapshot(tmp_path / "whole", 30), runs.snapshot(tmp_path / "run", 30)
    )


@pytest.mark.thorough
@SLOW
def test_an_architecture_is_trained_from_random_weights(small, bases, tmp_path):
    """The weights are a function of the seed, and not those of the folder."""
    own = [word for word in small if not word.startswith("model.n_")]
    own += [f"model.architecture={bases['llama']}", "train.max_steps=10"]
    result = runs.train(*own, f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert runs.losses(tmp_path / "run")[-1] < runs.losses(tmp_path / "run")[0]
    file = runs.rehearsal("fsdp_cpu.yaml", tmp_path, 2)
    result = runs.launch(file, *own, f"run.dir={tmp_path / 'fsdp'}")
    assert result.returncode == 0, result.stderr
    difference = torch.tensor(runs.losses(tmp_path / "run")) - torch.tensor(
        runs.losses(tmp_path / "fsdp")
    )
    assert difference.abs().max() < 1e-5


@pytest.mark.thorough
def test_a_model_begins_from_another_run_of_ours(small, finished_run, tmp_path):
    """From the run's folder: its newest snapshot's weights, step 1, and a new optimizer."""
    result = runs.train(*words(small, finished_run), f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    before = runs.metrics(finished_run, "eval")[-1]["loss"]
    assert runs.losses(tmp_path / "run")[0] < before + 0.5


@pytest.mark.thorough
@THOROUGH
def test_generating_and_verifying_know_such_a_snapshot(small, bases, tmp_path):
    result = runs.train(*words(small, bases["gemma3"]), f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    text = runs.run(runs.command(str(tmp_path / "run"), "--length", "60", script="sample.py"))
    assert text.returncode == 0, text.stderr
    assert text.stdout.endswith("\n")
    assert len(text.stdout) > 2
    checked = runs.run([*runs.MODULE, "verify", str(tmp_path / "run")])
    assert checked.returncode == 0, checked.stderr
    assert "2 layers, 4 heads, 32 wide" in checked.stdout


@THOROUGH
def test_a_damaged_tokenizer_of_the_newest_snapshot_is_skipped(small, bases, tmp_path):
    here = words(small, bases["llama"], f"run.dir={tmp_path / 'run'}")
    assert runs.train(*here).returncode == 0
    (runs.snapshot(tmp_path / "run", 10) / "tokenizer.json").write_text("{")
    result = runs.train(*here)
    assert result.returncode == 0, result.stderr
    assert "step-00000005, the newest of this run" in result.stdout
