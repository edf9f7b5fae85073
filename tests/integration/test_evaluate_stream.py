"""evaluate.py for a run that streams its text: the run's own number, on its held-out rows."""

from __future__ import annotations

import json
import shutil

import pytest
from huggingface_hub import constants

import evaluate as script
import hubs
import runs
import streams
from evaluations import T, assert_as_reported, changed


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return [
        streams.parquet_folder(folder / "a", "a", rows=100),
        streams.lines_folder(folder / "b", "b", rows=100),
    ]


@pytest.fixture(scope="module")
def run_of(small, cache, tmp_path_factory):
    """A finished run of these streams."""

    def trained(*words: str):
        run_dir = tmp_path_factory.mktemp("runs") / "run"
        window = ("data.window_bytes=3000", "data.prefetch_bytes=6000", "data.held_out_bytes=3000")
        stream = ("data.tokenizer=bpe:257", *window, "snapshot.every=30", *words)
        own = [f"run.dir={run_dir}", f"data.cache_dir={cache}", "train.max_steps=30"]
        result = runs.train(*small, *stream, *own)
        assert result.returncode == 0, result.stderr
        return run_dir

    return trained


@pytest.fixture(scope="module")
def mixed_run(run_of, sources):
    parts = [
        f"{{source:{source},weight:{weight},text_column:text}}"
        for source, weight in zip(sources, (0.7, 0.3), strict=True)
    ]
    mix = f"data.mix=[{','.join(parts)}]"
    return run_of(mix, "data.text_column=body", "train.eval_batches=2")


@pytest.fixture(scope="module")
def single_run(run_of, sources):
    return run_of(f"data.source={sources[0]}", "data.streaming=true")


@pytest.fixture
def evaluated(cache, capsys):
    """The exit code for these arguments, with the figures or the sentence on stderr."""

    def found(*words: object):
        fixed = ("--cache-dir", str(cache), "--device", "cpu", "--json")
        code = script.main([*map(str, words), *fixed])
        output = capsys.readouterr()
        return code, json.loads(output.out) if code == 0 else output.err

    return found


def test_a_mix_has_the_number_that_its_run_has_reported(mixed_run, evaluated):
    code, found = evaluated(mixed_run)
    assert code == 0, found
    assert_as_reported(found, mixed_run)
    assert found["tokens"] == 2 * 8 * T < found["tokens_of_text"]
    code, whole = evaluated(mixed_run, "--batches", 10**6)
    assert whole["tokens"] == whole["tokens_of_text"]


def test_a_source_that_was_moved_is_named(single_run, sources, evaluated, tmp_path):
    code, found = evaluated(single_run)
    assert code == 0, found
    assert_as_reported(found, single_run)
    moved = shutil.copytree(sources[0], tmp_path / "moved")
    folder = changed(single_run, tmp_path, source=str(tmp_path / "gone"))
    code, sentence = evaluated(folder)
    assert code == 2
    assert str(tmp_path / "gone") in sentence
    code, again = evaluated(folder, "--source", moved, "--held-out")
    assert code == 0, again
    assert_as_reported(again, single_run)


def test_what_is_not_the_run_s_text_is_a_sentence(mixed_run, single_run, sources, evaluated):
    for words, said in [
        ([mixed_run, "--source", sources[0], "--held-out"], "is one source, and the run has 2"),
        ([single_run, "--source", sources[1], "--held-out"], "the text is not the run's: "),
        ([single_run, "--documents", "masked"], "--documents masked is not the run's"),
        ([single_run, "--column", "none"], "none"),
    ]:
        code, sentence = evaluated(*words)
        assert (code, said in sentence, sentence.count("\n")) == (2, True, 1), sentence


@pytest.mark.parametrize(
    "data",
    [
        {"mix": 7},
        {"mix": [{"source": "a", "weight": "much", "text_column": None}] * 2},
        {"mix": [{"source": 7, "weight": 1.0, "text_column": None}] * 2},
        {"mix": [{"source": "a", "weight": -1.0, "text_column": None}] * 2},
        {"mix": [{"source": "a", "weight": 1.0, "text_column": None}] * 3},
        {"window_bytes": 0},
        {"skip_broken": "yes"},
    ],
)
def test_a_state_that_no_run_writes_is_a_sentence(mixed_run, evaluated, tmp_path, data):
    code, sentence = evaluated(changed(mixed_run, tmp_path, **data))
    assert code == 2
    assert "has no valid configuration in its state: " in sentence


def test_an_address_that_a_repo_names_is_not_opened(
    near_hub, single_run, evaluated, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hubs.put(near_hub, changed(single_run, tmp_path, source="s3://bucket/rows.parquet"), 30)
    code, sentence = evaluated(hubs.REPO)
    assert code == 2
    assert "s3://bucket/rows.parquet. For safety, an address from a store is not opened" in sentence
