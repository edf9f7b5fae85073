"""A model of the Hub or of a folder: loaded, trained in any shape, and saved as it was."""

from __future__ import annotations

import families
import pytest
import torch

import runs
from model.causal_lm import build_model
from snapshot.disk.architecture import layout_of, model_config
from snapshot.disk.files import read_json
from snapshot.disk.state import restore_weights

SHAPES = {
    "accumulated": ("cpu.yaml", 1, ("train.micro_batch_size=4",)),
    "DDP-2": ("ddp_cpu.yaml", 2, ()),
    "FSDP-2": ("fsdp_cpu.yaml", 2, ()),
}
MODELS = list(families.FAMILIES)


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
def test_logits_from_several_files_of_16_bits_are_those_of_transformers(tmp_path, family):
    folder = families.make(family, tmp_path / "base", pieces=True, dtype="bfloat16")
    assert largest_difference(folder) < 1e-5


@pytest.mark.parametrize("family", MODELS)
def test_what_is_written_has_the_names_that_transformers_writes(bases, family):
    path = bases[family] / "config.json"
    with torch.device("meta"):
        layout = layout_of(build_model(model_config(read_json(path), str(path))))
    written = {name: shape for one in layout.written() for name, shape in one.shapes.items()}
    from safetensors import safe_open

    with safe_open(bases[family] / "model.safetensors", "pt") as file:
        there = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert written == there


@pytest.mark.parametrize("family", MODELS)
def test_every_shape_has_the_losses_of_one_process(small, bases, family, tmp_path):
    words = [word for word in small if not word.startswith("model.n_")]
    words += [f"model.pretrained={bases[family]}", "train.max_steps=10", "snapshot.every=5"]
    alone = runs.train(*words, f"run.dir={tmp_path / 'alone'}")
    assert alone.returncode == 0, alone.stderr
    for name, (config, processes, more) in SHAPES.items():
        place = tmp_path / name.replace(" ", "-")
        place.mkdir()
        file = runs.rehearsal(config, place, processes)
        result = runs.launch(file, *words, *more, f"run.dir={place / 'run'}")
        assert result.returncode == 0, result.stderr
        expected = torch.tensor(runs.losses(tmp_path / "alone"))
        found = torch.tensor(runs.losses(place / "run"))
        assert (expected - found).abs().max() < 1e-5, name
        saved = runs.snapshot(place / "run", 10)
        assert largest_difference(saved) < 1e-5
