"""Promise 7: wrong input gets a sentence and exit code 2, before any training."""

from __future__ import annotations

import random
import re
import shutil

import pytest

import runs
from config.checks import CHOICES, PATHS, PATTERNS, RANGES
from config.compose import load_config
from config.removed import REMOVED
from config.schema import KEYS, TEXT_KEYS, ConfigError
from training.distributed.processes import exit_code_for
from training.run.run_dir import RunLock

MISTAKES = {
    "train.max_step=3 train.seed=x model.dropout=1.5 steps": [
        "no key 'train.max_step'. The nearest key is train.max_steps.",
        "train.seed=x is not a whole number.",
        "model.dropout=1.5 must be between 0 and 0.99.",
        "'steps' is not of the form key=value.",
    ],
    "data.source={tmp}/latin1.txt": ["latin1.txt cannot be read: byte 0xe9 is not UTF-8"],
    "snapshot.resume={tmp}/nowhere": [
        "nowhere is neither a folder that exists",
        "Name a snapshot that is whole, a run's folder, or its store, or leave it out.",
    ],
}
"""One of each room, and parts of its sentences, which have tests of their own."""
SEED, DRAWN = 2026, 40
REMEDY = re.compile(
    r"must (be|have) |is not (a |true)|at most \d|Leave it out|Write |nearest key is |removed in"
)
"""What a sentence asks for, or names as the only values."""


def wrong_inputs() -> list[str]:
    """Each rule of the tables broken in each way: ranges, choices, forms, types, names of keys."""
    found = [f"{key}=none-of-them" for key in CHOICES]
    for key, (least, most) in RANGES.items():
        found += [f"{key}={least - 1}", f"{key}=many"]
        found += [f"{key}={most + 1}"] * (most < 1e16)  # above, a float has no next one
        found += [f"{key}=nan"] * (KEYS[key].startswith("float"))
    found += [f"{key}=A B" for key in PATTERNS] + [f"{key}=''" for key in PATHS]
    found += [f"{key}=a,b" for key in TEXT_KEYS]
    found += [name if "=" in name else f"{name}=1" for name in REMOVED if " " not in name]
    found += [f"{key[:-1]}=1" for key in KEYS] + [f"--{key.partition('.')[2]}" for key in KEYS]
    return found


@pytest.mark.parametrize("word", random.Random(SEED).sample(wrong_inputs(), DRAWN))
def test_a_wrong_input_gets_a_sentence_and_writes_nothing(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config([word])
    assert exit_code_for(caught.value) == 2
    sentence = str(caught.value).splitlines()[0]
    key, _, value = word.partition("=")
    assert key in sentence
    assert value.strip("'")[:5] in sentence or key not in KEYS
    assert REMEDY.search(sentence), sentence
    assert sentence.endswith(".")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_gets_a_sentence_and_exit_code_2(tmp_path, words):
    (tmp_path / "latin1.txt").write_bytes("caf\xe9 au lait ".encode("latin-1") * 50)
    own = [f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    in_a_shell = "steps" in words  # where Python starts anew
    result = runs.train(*own, *words.format(tmp=tmp_path).split(), forked=not in_a_shell, code=2)
    for part in MISTAKES[words]:
        assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert "step 1" not in result.stdout
    assert not in_a_shell or not (tmp_path / "run").exists()


def test_two_processes_cannot_train_in_one_directory(tmp_path, monkeypatch):
    """With less time for the other one to end."""
    monkeypatch.setattr("training.run.run_dir.WAIT_SECONDS", 0.2)
    first, second = RunLock(), RunLock()
    first.acquire(tmp_path / "run")
    with pytest.raises(ConfigError, match="is in use: another process trains in it") as caught:
        second.acquire(tmp_path / "run")
    assert exit_code_for(caught.value) == 2
    first._lock.release()
    second.acquire(tmp_path / "run")
    second._lock.release()


ON_MAIN = {
    "none.txt does not exist": [],
    "tokenizer.json is missing": [pytest.mark.thorough],
}
"""Sentences about a text, and about a snapshot."""


@pytest.mark.parametrize("sentence", [pytest.param(key, marks=ON_MAIN[key]) for key in ON_MAIN])
def test_what_fails_on_the_main_process_ends_all_at_once(finished_run, small, tmp_path, sentence):
    run_dir, words = tmp_path / "run", [*small, "train.max_steps=40"]
    if "none.txt" in sentence:
        words.append("data.source=none.txt")
    else:
        damaged = shutil.copytree(runs.snapshot(finished_run, 30), tmp_path / "damaged")
        (damaged / "tokenizer.json").unlink()
        words.append(f"snapshot.resume={damaged}")
    result = runs.launch("ddp_cpu.yaml", *words, f"run.dir={run_dir}")
    assert result.returncode != 0
    assert result.stderr.count(sentence) == result.stderr.count("error: ") == 1


def test_a_loss_that_is_not_finite_stops_the_run(finished_run, small, tmp_path):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    words = [*small, "model.dropout=0.1", "train.max_steps=40", "optim.warmup_steps=0"]
    wrong = ["optim.learning_rate=1e38", "train.eval_every=100", "snapshot.every=1"]
    result = runs.train(*words, *wrong, f"run.dir={run_dir}", code=1)
    assert "stopped: the loss is nan at step 32" in result.stderr
    assert "with an earlier snapshot: run.name=<name> snapshot.resume=<its folder>" in result.stderr
    assert "Traceback" not in result.stderr
    earlier = f"snapshot.resume={runs.snapshot(run_dir, 30)}"
    assert runs.train(*words, earlier, f"run.dir={tmp_path / 'new'}").returncode == 0


@pytest.mark.thorough
def test_an_output_that_nobody_reads_does_not_stop_a_run(small, tmp_path):
    with runs.started(runs.command(*small, f"run.dir={tmp_path / 'run'}")) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=runs.DEADLINE_SECONDS) == 0
    assert len(runs.losses(tmp_path / "run")) == 30


def test_a_precision_that_there_is_not_is_refused(small, tmp_path):
    of_fp8 = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_RECIPE_NAME": "columnwise"}
    result = runs.train(*small, f"run.dir={tmp_path / 'run'}", **of_fp8, code=2)
    assert "recipe_name: columnwise. Scales are of whole tensors: set tensorwise." in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_model_unlike_its_config_json_is_refused_before_anything_is_written(small, tmp_path):
    places = [f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    words = runs.command("undescribed", *small, *places, script=str(runs.ALTERED))
    assert "model/gpt.py has extra []" in runs.run(words, code=2).stderr
    assert list(tmp_path.iterdir()) == []
