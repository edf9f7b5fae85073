"""LoRA, whose snapshots hold the adapters alone: each promise holds, and the base is known."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import families
import hubs
import runs
from model.lora import Lora
from sealed import seal
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import read_json
from snapshot.disk.model import read_adapters
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError
from snapshot.named_model import find_model, open_base_of

LORA = ("model.lora_rank=4", "model.dropout=0.1", "optim.learning_rate=0.01")


def words(small, base, *more):
    """The overrides of a run of twenty steps that begins from a model."""
    return families.words(small, base, "train.max_steps=20", *more)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return families.make("llama tied", tmp_path_factory.mktemp("bases") / "llama", dtype="bfloat16")


@pytest.fixture(scope="module")
def bases(llama, finished_run):
    """A model of transformers, and one of our own GPT: the folder of a run."""
    return {"llama": llama, "own": finished_run}


@pytest.fixture(scope="module")
def trained(small, bases, tmp_path_factory):
    """Runs of adapters on one process, each done once."""
    done = {}

    def run_of(family, more=LORA):
        if (family, more) not in done:
            run_dir = tmp_path_factory.mktemp("adapters") / "run"
            result = runs.train(*words(small, bases[family], *more), f"run.dir={run_dir}", code=0)
            assert " of them, by " in result.stdout
            done[family, more] = run_dir
        return done[family, more]

    return run_of


def ours(folder, ids):
    """Logits of a snapshot, or of any model, as sample.py and evaluate.py load it."""
    with torch.no_grad():
        return find_model(str(folder)).load().eval()(ids)


def theirs(folder, ids):
    """Logits as transformers computes them, which loads adapters with their base."""
    with torch.no_grad():
        return families.theirs(folder)(ids).logits


def merged(run_dir, folder):
    runs.run([*runs.MODULE, "merge", str(run_dir), str(folder)], code=0)
    return folder


@pytest.mark.parametrize("family", ["own", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_snapshot_of_adapters_computes_the_same_elsewhere(trained, family, tmp_path):
    run_dir = trained(family)
    assert runs.losses(run_dir)[-1] < runs.losses(run_dir)[0]
    place = runs.snapshot(run_dir, 20)
    names = {path.name for path in place.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} < names
    assert not names & {"model.safetensors", "config.json"}
    assert all(".lora_" in name for name in runs.tensors(place))
    ids = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(1))
    found = ours(place, ids)
    named = read_json(place / "adapter_config.json")["base_model_name_or_path"]
    base = find_model(named).load().eval()
    with torch.no_grad():
        assert (found - base(ids)).abs().max() > 1e-3  # it has learned something
    assert (theirs(place, ids) - found).abs().max() < 1e-5
    whole = merged(run_dir, tmp_path / "whole")
    assert (theirs(whole, ids) - found).abs().max() < 1e-5
    assert (ours(whole, ids) - found).abs().max() < 1e-5


@pytest.mark.thorough
def test_a_base_is_known_by_its_weights_wherever_it_is(trained, llama, tmp_path):
    place = tmp_path / "step-00000020"
    shutil.copytree(runs.snapshot(trained("llama"), 20), place)
    adapters, digest = read_adapters(place), read_state(place).base_digest
    assert adapters.lora == Lora(4, 8, adapters.lora.targets, 0.1)
    assert adapters.lora.targets[-1] == "v_proj"
    assert open_base_of(adapters, digest, place, 1.0).folder == llama
    moved = shutil.copytree(llama, tmp_path / "moved")
    assert open_base_of(adapters, digest, place, 1.0, str(moved)).folder == moved
    for other in (families.make("llama", tmp_path / "other"), "them/other"):
        with pytest.raises(SnapshotError, match=rf"base .* is not (what is in )?{other}"):
            open_base_of(adapters, digest, place, 1.0, str(other))  # another base is another run
    gone = read_json(place / "adapter_config.json") | {"base_model_name_or_path": "gone"}
    (place / "adapter_config.json").write_text(json.dumps(gone))
    seal(place)
    with pytest.raises(SnapshotError, match=r"base gone is not there. .* --base <folder>"):
        find_model(str(place)).load()
    assert find_model(str(place), str(moved)).load() is not None
    with open(moved / "model.safetensors", "r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"!")
    with pytest.raises(SnapshotError, match=r"base gone is not what is in .*moved"):
        find_model(str(place), str(moved)).load()


@pytest.mark.thorough
def test_a_run_of_adapters_resumes_from_its_repo_and_base(small, llama, hub, tmp_path):
    """The base is pinned to its commit, whatever is published there later."""
    commit = hubs.publish(hub, "them/model", llama)
    constant = (*LORA, "optim.min_learning_rate=0.01")  # whatever the last step
    more = [*constant, *hubs.words(tmp_path / "run")]
    command = words(small, "them/model", *more, f"run.dir={tmp_path / 'run'}")
    runs.train(*command, "train.max_steps=10", **hub.environment(), code=0)
    other = families.make("llama", tmp_path / "other")
    hub.commit_files("them/model", {path.name: path.read_bytes() for path in other.iterdir()})
    shutil.rmtree(tmp_path / "run")
    there = hub.environment() | {"HF_HOME": str(tmp_path / "elsewhere")}
    result = runs.train(*command, **there, code=0)
    assert f"fetched from {hubs.REPO}@" in result.stdout
    place = runs.snapshot(tmp_path / "run", 20)
    assert read_adapters(place).revision == commit
    runs.train(*words(small, llama, *constant, f"run.dir={tmp_path / 'alone'}"), code=0)
    runs.assert_same_bits(runs.snapshot(tmp_path / "alone", 20), place)
    repo = hub.repo(hubs.REPO)
    files = repo.files(repo.head)
    assert "library_name: peft" in repo.read(repo.head, "README.md").decode()
    assert {"adapter_model.safetensors", "adapter_config.json"} < set(files)
    assert "config.json" not in files
    runs.run(runs.command(hubs.REPO, "--length", "9", script="sample.py"), **there, code=0)


@pytest.mark.thorough
def test_adapters_are_not_taken_for_a_model(small, trained, tmp_path):
    begun = words(small, trained("own"), f"run.dir={tmp_path / 'run'}")
    result = runs.train(*begun, code=2)
    assert "holds adapters and not their base" in result.stderr


OF_PEFT, OF_RUN = "adapter_config.json", "state.json"
WRONG = {
    "a base outside": (OF_PEFT, ["revision"], "main"),
    "another width": (OF_RUN, ["base_config", "n_embd"], 36),
    "no width": (OF_RUN, ["base_config"], None),
    "code": (OF_RUN, ["base_config", "auto_map"], {"x": "y"}),
    "another rank": (OF_PEFT, ["r"], 5),
    "a rank of 0": (OF_PEFT, ["r"], 0),
    "another layer": (OF_PEFT, ["target_modules"], ["c_fc"]),
    "a layer that is none": (OF_PEFT, ["target_modules"], ["x"]),
    "a pattern": (OF_PEFT, ["target_modules"], ".*"),
    "another entry": (OF_PEFT, ["auto_mapping"], {"parent_library": "os"}),
    "a run without adapters": (OF_RUN, ["config", "model", "lora_rank"], None),
    "a name that is no path": (OF_PEFT, ["base_model_name_or_path"], "x" * 5000),
}


@pytest.mark.parametrize("case", WRONG)
def test_hostile_adapters_are_refused(trained, tmp_path, case):
    place = shutil.copytree(runs.snapshot(trained("own"), 20), tmp_path / "step-00000020")
    check_snapshot(place)
    name, (*way, last), value = WRONG[case]
    content = entry = read_json(place / name)
    for key in way:
        entry = entry[key]
    entry[last] = value
    (place / name).write_text(json.dumps(content))
    seal(place)
    with pytest.raises(SnapshotError):
        check_snapshot(place)
