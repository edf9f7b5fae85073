"""A model of the Hub or of a folder: loaded, trained in any shape, and saved as it was."""

from __future__ import annotations

import shutil

import pytest

import families
import hubs
import runs
from snapshot.disk.folder import read_json

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


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers(bases, family):
    families.assert_computed_by_transformers(bases[family])


@pytest.mark.parametrize("family", ["llama tied", "mixtral", "gpt2"])
def test_logits_of_several_16_bit_files_are_transformers(tmp_path, family):
    folder = families.make(family, tmp_path / "base", pieces=True, dtype="bfloat16")
    families.assert_computed_by_transformers(folder)


def words(small, base, *more):
    """The overrides of a run of ten steps that begins from a model."""
    return families.words(small, base, "train.max_steps=10", "snapshot.every=5", *more)


@pytest.mark.parametrize(
    "pieces",
    [pytest.param(False, marks=THOROUGH), pytest.param(True, marks=SLOW)],
    ids=["one file", "several files"],
)
def test_a_model_of_the_hub_is_the_same_as_its_folder(small, tmp_path, hub, pieces):
    """Through the client's cache and Xet; and a run that has begun needs that repo no longer."""
    folder = families.make("qwen3", tmp_path / "base", pieces, dtype="bfloat16")
    commit = hubs.publish(hub, "them/model", folder)
    runs.train(*words(small, folder), f"run.dir={tmp_path / 'local'}", code=0)
    there = {**hub.environment(), "HF_HOME": str(tmp_path / "cache")}
    begun = words(small, "them/model", f"run.dir={tmp_path / 'run'}")
    result = runs.train(*begun, "train.max_steps=5", **there, code=0)
    assert f"from      them/model@{commit[:12]} (qwen3): its weights" in result.stdout
    hub.delete("them/model")
    shutil.rmtree(tmp_path / "cache")
    runs.train(*begun, **there, code=0)
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
