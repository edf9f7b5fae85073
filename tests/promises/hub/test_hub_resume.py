"""Promise 2 over the Hub: the same command on an empty disk goes on, with the same bits."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import hubs
import runs

STEPS = 30
"""As many as `finished_run` has, which is the run without a disturbance."""


def overrides(small: list[str], *more: str) -> list[str]:
    """Those of `finished_run`."""
    return [*small, "model.dropout=0.1", *more]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home") / "of-another-machine"


@pytest.fixture
def another_home(home) -> dict[str, str]:
    """The variable that gives the Hub client an empty cache, as on another machine.

    It is the same for all tests: the processes of several can be forked from one.
    """
    shutil.rmtree(home, ignore_errors=True)
    return {"HF_HOME": str(home)}


def launched(config: str, processes: int, *words: str) -> list[str]:
    if processes == 1:
        return runs.command(*words)
    return runs.launch_command(config, *words, options=(f"--num_processes={processes}",))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("", 1), ("", 1)),
        pytest.param(("ddp_cpu.yaml", 2), ("ddp_cpu.yaml", 2), marks=pytest.mark.slow),
        pytest.param(("ddp_cpu.yaml", 2), ("fsdp_cpu.yaml", 2), marks=pytest.mark.slow),
    ],
    ids=["one", "DDP-2", "DDP-2 to FSDP-2"],
)
def test_a_run_goes_on_from_its_repo_on_another_machine(
    finished_run, small, tmp_path, hub, another_home, before, after
):
    here, there, alone = tmp_path / "here", tmp_path / "there", finished_run
    hubs_words = {  # a relative run.dir, as the default is
        where: overrides(
            small, *hubs.words(os.path.relpath(where, runs.ROOT), f"data.cache_dir={where}-data")
        )
        for where in (here, there)
    }
    if after[1] > 1:
        alone = tmp_path / "alone"
        whole = runs.run(launched(*after, *overrides(small, f"run.dir={alone}")))
        assert whole.returncode == 0, whole.stderr
    # The last snapshot does not come through before the machine is lost.
    hub.fault("commit", "hang", after=1, times=None)
    with runs.started(launched(*before, *hubs_words[here]), **hub.environment()):
        hub.wait_for(lambda: hubs.step_of(hub) >= 10)
    hub.clear_faults()
    reached = hubs.step_of(hub)
    assert reached < STEPS
    shutil.rmtree(here)
    rest = runs.run(launched(*after, *hubs_words[there]), **hub.environment() | another_home)
    assert rest.returncode == 0, rest.stderr
    assert f"fetched from {hubs.REPO}@" in rest.stdout
    assert f"{after[1]} process" in rest.stdout
    # The metrics of the steps before were fetched, too: every step is there, once.
    assert [record["step"] for record in runs.metrics(there)] == list(range(1, STEPS + 1))
    assert runs.losses(there) == pytest.approx(
        runs.losses(alone), rel=0 if before == after else 1e-5
    )
    # The newest is what was there when it started, whatever was still on its way then.
    moved = runs.metrics(there, "start")
    assert [one["text"] for one in moved] == ["from scratch", "resumed"]
    assert reached <= moved[1]["step"] < STEPS
    if before == after:
        runs.assert_same_bits(runs.snapshot(alone, STEPS), runs.snapshot(there, STEPS))
    assert hubs.step_of(hub) == STEPS
    hubs.assert_always_whole(hub)
    # One process a machine downloads, whatever their number.
    assert hub.count("reconstruction") == 2  # weights and optimizer


@pytest.mark.thorough
def test_a_new_run_begins_from_a_repo(finished_run, small, tmp_path, hub):
    hubs.seed(hub, runs.snapshot(finished_run, 30))
    head = hub.repo(hubs.REPO).head
    named = [f"run.dir={tmp_path / 'b'}", "run.name=b", f"snapshot.resume={hubs.REPO}@{head}"]
    more = overrides(small, *named, "train.max_steps=40", "hub.repo_id=me/other")
    result = runs.train(*more, **hub.environment())
    assert result.returncode == 0, result.stderr
    assert f"from {hubs.REPO}@{head}, step 30, as snapshot.resume asks" in result.stdout
    assert runs.metrics(tmp_path / "b")[0]["step"] == 31
    assert hubs.step_of(hub, "me/other") == 40
    assert hubs.step_of(hub) == 30
    origin = json.loads((runs.snapshot(tmp_path / "b", 40) / "state.json").read_text())["origin"]
    assert origin == hubs.latest(hub)["manifest_sha256"]
    assert not list((tmp_path / "b" / "snapshots").glob(".tmp-*"))
    # The same words again go on, also on an empty disk, also when the first repo is gone.
    hub.delete(hubs.REPO)
    shutil.rmtree(tmp_path / "b")
    again = runs.train(*more, "train.max_steps=50", **hub.environment())
    assert again.returncode == 0, again.stderr
    assert [one["step"] for one in runs.metrics(tmp_path / "b")] == list(range(31, 51))


def test_another_run_s_snapshot_is_refused_before_the_download(finished_run, small, tmp_path, hub):
    """So the corrected command begins its own run, and uploads it to its own repo."""
    hubs.seed(hub, runs.snapshot(finished_run, 20))
    run_dir, before = tmp_path / "run", len(hub.requests)
    for more in ([], [f"snapshot.resume={hubs.REPO}", "hub.repo_id=null"]):
        words = [*overrides(small, *hubs.words(run_dir)), "train.seed=7", *more]
        result = runs.train(*words, **hub.environment())
        assert result.returncode == 2
        assert "belongs to another run:\n  train.seed: 1337 in the snapshot, 7 now" in result.stderr
        asked = {
            one.path.rpartition("/")[2] for one in hub.requests[before:] if "step-" in one.path
        }
        assert asked == {"manifest.json", "state.json"}
        assert not any("xet-read-token" in one.path for one in hub.requests[before:])
        assert not list(run_dir.glob("snapshots/step-*"))


@pytest.mark.thorough
def test_what_was_not_uploaded_goes_first_at_the_next_start(finished_run, small, tmp_path, hub):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    hubs.seed(hub, runs.snapshot(run_dir, 10))
    more = ("train.max_steps=40", "hub.milestone_every=10")
    words = overrides(small, *hubs.words(run_dir), *more)
    hub.fault("xorb", "status", status=503, times=None)
    late = runs.train(*words, "hub.flush_seconds=1", **hub.environment())
    assert late.returncode == 0, late.stderr
    assert "has step 10, not the newest" in late.stdout
    assert hubs.step_of(hub) == 10
    hub.clear_faults()
    again = runs.train(*words, **hub.environment())  # a finished run: nothing to train
    assert "The run is finished at step 40" in again.stdout
    assert hubs.step_of(hub) == 40
    assert hubs.steps_at_head(hub.repo(hubs.REPO)) == [10, 20, 30, 40]  # all are milestones
    hubs.assert_always_whole(hub)


@pytest.mark.thorough
def test_sample_speaks_from_a_repo(finished_run, hub, another_home):
    hubs.seed(hub, runs.snapshot(finished_run, 30))
    there = hub.environment() | another_home
    remote = runs.run(runs.command(hubs.REPO, script="sample.py"), **there)
    assert remote.returncode == 0, remote.stderr
    local = runs.run(runs.command(str(finished_run), script="sample.py"))
    assert remote.stdout == local.stdout
    gets = [one.path for one in hub.requests if one.endpoint == "xorb-get"]
    assert len(gets) == 1  # no optimizer
    again = runs.run(runs.command(hubs.REPO, script="sample.py"), **there)
    assert again.stdout == local.stdout
    assert [one.path for one in hub.requests if one.endpoint == "xorb-get"] == gets  # kept
    missing = runs.run(runs.command("me/none", script="sample.py"), **there)
    assert missing.returncode == 2
    assert "there is no repo me/none" in missing.stderr


def test_transformers_loads_the_repo(finished_run, tmp_path, hub, another_home):
    """Promise 6, from the repo itself: tokens, logits and greedy text as here."""
    hubs.seed(hub, runs.snapshot(finished_run, 30))
    script = tmp_path / "load.py"
    script.write_text(
        "import json, sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline\n"
        f"model = AutoModelForCausalLM.from_pretrained({hubs.REPO!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({hubs.REPO!r})\n"
        f"speak = pipeline('text-generation', model={hubs.REPO!r})\n"
        "ids = tokenizer('The run', return_tensors='pt')['input_ids']\n"
        "text = speak('the r', max_new_tokens=9, do_sample=False)[0]['generated_text']\n"
        "print(json.dumps([model(ids).logits[0].tolist(), text]))\n"
    )
    there = hub.environment() | another_home
    loaded = runs.run([sys.executable, str(script)], **there)
    assert loaded.returncode == 0, loaded.stderr
    logits, text = json.loads(loaded.stdout.splitlines()[-1])
    model, tokenizer = runs.loaded(runs.snapshot(finished_run, 30))
    ids = torch.tensor(tokenizer.encode("The run").astype("int64"))[None]
    difference = (model(ids)[0] - torch.tensor(logits)).abs().max().item()
    print(f"largest difference of logits: {difference:.1e}")
    assert difference < 1e-4
    greedy = ["--prompt", "the r", "--length", "9", "--temperature", "0"]
    ours = runs.run(runs.command(hubs.REPO, *greedy, script="sample.py"), **there)
    assert ours.stdout.removesuffix("\n") == text
