"""evaluate.py: the loss of any model over a text; of a run, prepared or streamed, its own."""

from __future__ import annotations

import json
import math
import os
import shutil

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import constants
from transformers import AutoTokenizer

import evaluate as script
import families
import hubs
import runs
import streams
from sealed import seal
from snapshot.disk.folder import read_json
from store.kinds import open_store

T = 16


@pytest.fixture(scope="module")
def cache(small) -> list[str]:
    """The arguments that name the cache in which the small runs have prepared their text."""
    (folder,) = (word.split("=")[1] for word in small if word.startswith("data.cache_dir="))
    return ["--cache-dir", folder]


@pytest.fixture
def figures(cache, capsys):
    """What `--json` prints for these arguments."""

    def printed(*words: object) -> dict:
        code = script.main([*map(str, words), *cache, "--device", "cpu", "--json"])
        output = capsys.readouterr()
        assert code == 0, output.err
        assert output.err == ""
        return json.loads(output.out)

    return printed


@pytest.fixture
def refused(cache, capsys):
    """The sentence on stderr for these arguments, which are a user's mistake."""

    def printed(*words: object) -> str:
        assert script.main([*cache, "--device", "cpu", *map(str, words)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("error: ")
        assert output.err.count("\n") == 1
        return output.err

    return printed


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return families.make("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def other_text(tmp_path_factory):
    """A text of which the tokenizer of the small run knows every character."""
    path = tmp_path_factory.mktemp("other") / "other.txt"
    path.write_text("the step was lost and the run goes on\n" * 40)
    return path


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    """The folder of a finished run with these words."""

    def run(*words: str):
        run_dir = tmp_path_factory.mktemp("runs") / "run"
        own = [word for word in small if not word.startswith("model.n_")]
        end = ["train.max_steps=30", "train.eval_every=30", "snapshot.every=30"]
        runs.train(*own, *words, *end, f"run.dir={run_dir}", code=0)
        return run_dir

    return run


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return [
        streams.parquet_folder(folder / "a", "a", rows=100),
        streams.lines_folder(folder / "b", "b", rows=100),
    ]


STREAM = (
    *("data.tokenizer=bpe:257", "model.n_layer=1", "model.n_embd=32", "model.n_head=2"),
    *("data.window_bytes=3000", "data.held_out_bytes=3000"),
)


@pytest.fixture(scope="module")
def mixed_run(trained, sources):
    parts = [
        f"{{source:{source},weight:{weight},text_column:text}}"
        for source, weight in zip(sources, (0.7, 0.3), strict=True)
    ]
    mix = f"data.mix=[{','.join(parts)}]"
    return trained(*STREAM, mix, "data.text_column=body", "train.eval_batches=2")


@pytest.fixture(scope="module")
def streamed_run(trained, sources):
    return trained(*STREAM, f"data.source={sources[0]}", "data.streaming=true")


def reported(run_dir) -> dict:
    """The newest evaluation that a run has recorded."""
    return runs.metrics(run_dir, "eval")[-1]


def assert_as_reported(found: dict, run_dir) -> None:
    record = reported(run_dir)
    assert found["step"] == record["step"]
    assert found["loss"] == pytest.approx(record["loss"], abs=1e-6)
    assert found["bits_per_byte"] == pytest.approx(record["bits_per_byte"], abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(record["loss"]), rel=1e-6)
    assert found["held_out"]


def changed(run_dir, folder, **data: object):
    """A copy of a snapshot whose state has other values in `data`, and a manifest that fits."""
    copy = shutil.copytree(runs.snapshot(run_dir, 30), runs.snapshot(folder / "changed", 30))
    shutil.copy(run_dir / "config.yaml", folder / "changed")  # it says where the text lies
    state = read_json(copy / "state.json")
    state["config"]["data"] |= data
    (copy / "state.json").write_text(json.dumps(state))
    seal(copy)
    return copy


def test_the_loss_of_a_run_is_the_one_that_it_has_reported(finished_run, figures):
    found = figures(finished_run)
    assert_as_reported(found, finished_run)
    state = read_json(runs.snapshot(finished_run, 30) / "state.json")["data"]
    assert found["fingerprint"] == state["fingerprint"]
    assert found["tokens"] == found["tokens_of_text"] == state["held_out_tokens"] - 1
    assert (found["unit"], found["block_size"]) == ("character", T)
    earlier = figures(runs.snapshot(finished_run, 20))
    assert earlier["step"] == 20
    assert abs(earlier["loss"] - found["loss"]) > 1e-3


def test_neither_batch_nor_place_changes_the_loss(
    finished_run, text_file, figures, refused, tmp_path
):
    copy = shutil.copytree(runs.snapshot(finished_run, 30), tmp_path / "step-00000030")
    text = ["--source", text_file, "--held-out"]  # a snapshot does not say where that lies
    for words in (["--batch-size", 3], ["--batch-size", 10**9]):
        assert_as_reported(figures(copy, *words, *text), finished_run)
    assert "add --source <folder>/text.txt --held-out" in refused(copy)


def test_a_partial_evaluation_with_subwords_has_the_run_s_number(
    trained, mixed_run, pretrained, figures
):
    """Of a text that is prepared, from a model of the Hub, and of a mix of streams."""
    prepared = trained(f"model.pretrained={pretrained}", "train.eval_batches=2")
    for run_dir in (prepared, mixed_run):
        found = figures(run_dir)
        assert_as_reported(found, run_dir)
        assert found["unit"] == "token"
        assert found["tokens"] == 2 * 8 * T < found["tokens_of_text"]
        everything = figures(run_dir, "--batches", 10**6)
        assert everything["tokens"] == everything["tokens_of_text"]
        assert everything["loss"] != found["loss"]


def test_a_stream_that_was_moved_is_named(streamed_run, sources, figures, refused, tmp_path):
    assert_as_reported(figures(streamed_run), streamed_run)
    moved = shutil.copytree(sources[0], tmp_path / "moved")
    folder = changed(streamed_run, tmp_path, source=str(tmp_path / "gone"))
    assert str(tmp_path / "gone") in refused(folder)
    assert_as_reported(figures(folder, "--source", moved, "--held-out"), streamed_run)


def expected_of(folder, text: str, block_size: int) -> tuple[float, int]:
    """The mean loss of transformers' model over consecutive windows, and the number of tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), families.theirs(folder)
    ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, block_size):
        window = ids[start : start + block_size + 1]
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    return total / count, count


@pytest.mark.parametrize("block_size", [None, 11])
def test_another_model_is_evaluated_over_all_of_a_text(pretrained, other_text, figures, block_size):
    words = [] if block_size is None else ["--block-size", block_size]
    found = figures(pretrained, "--source", other_text, *words)
    text, context = other_text.read_text(), families.SIZES["max_position_embeddings"]
    loss, count = expected_of(pretrained, text, block_size or context)
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["tokens"] == found["tokens_of_text"] == count
    per_byte = loss / math.log(2) * (count + 1) / len(text.encode())
    assert found["bits_per_byte"] == pytest.approx(per_byte, abs=1e-5)
    assert (found["step"], found["held_out"]) == (None, False)


def test_a_store_of_files_has_the_number_of_its_run(
    finished_run, text_file, figures, tmp_path, monkeypatch
):
    """Its newest snapshot, or the one that is named; each is downloaded once."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    store = open_store(f"file://{tmp_path}/shared", 5.0)
    hubs.upload(store, *(runs.snapshot(finished_run, step) for step in (10, 30)))
    whole = ("--source", text_file)
    assert_as_reported(figures(store.url, *whole, "--held-out"), finished_run)
    older = hubs.folder_of(runs.snapshot(finished_run, 10))
    found = figures(f"{store.url}@{older}", *whole)
    assert found["loss"] == figures(runs.snapshot(finished_run, 10), *whole)["loss"]
    files = {path: path.stat().st_ctime_ns for path in tmp_path.glob("home/**/*.safetensors")}
    assert files
    assert figures(f"{store.url}@{older}", *whole)["loss"] == found["loss"]
    assert files == {path: path.stat().st_ctime_ns for path in files}


@pytest.mark.parametrize("source", ["http://127.0.0.1:9/text.txt", "s3://bucket/rows.parquet"])
def test_an_address_that_a_repo_names_is_not_opened(
    near_hub, finished_run, streamed_run, refused, tmp_path, monkeypatch, source
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    run = finished_run if source.startswith("http") else streamed_run
    hubs.put(near_hub, changed(run, tmp_path, source=source), 30)
    said = refused(hubs.REPO)
    assert "For safety, an address from a store is not opened" in said
    assert source in said


PART = {"source": "a", "weight": 1.0, "text_column": None}
NO_STATE = [
    *({"source": 7}, {"source": "${oc.env:HOME}"}, {"block_size": True}, {"val_fraction": 1.0}),
    *({"window_bytes": 10**9}, {"window_bytes": 0}, {"mix": [{**PART, "weight": -1.0}] * 2}),
]


@pytest.mark.parametrize("data", NO_STATE, ids=str)
def test_a_state_that_no_run_writes_is_a_sentence(finished_run, mixed_run, refused, tmp_path, data):
    run = mixed_run if {"mix", "window_bytes", "skip_broken"} & {*data} else finished_run
    said = refused(changed(run, tmp_path, **data))
    assert "has no valid configuration in its state: " in said
    assert os.environ["HOME"] not in said.replace(str(tmp_path), "")


def test_mistakes_are_sentences(
    finished_run, mixed_run, streamed_run, sources, pretrained, other_text, refused, tmp_path
):
    unknown, single = tmp_path / "unknown.txt", tmp_path / "single.txt"
    unknown.write_text("the run is lost \u00e9\n" * 9)
    single.write_text("t")
    has_changed = changed(finished_run, tmp_path, source=str(other_text))
    for words, sentence in [
        ([tmp_path / "none"], "is neither a folder that exists nor a repo"),
        ([tmp_path], "it is neither a model nor a run with snapshots"),
        ([has_changed], "the text is not the run's: "),
        ([pretrained], "Name a text with --source."),
        ([pretrained, "--source", other_text, "--held-out"], "with --source, without --held-out"),
        ([finished_run, "--source", tmp_path / "none.txt"], "none.txt"),
        ([finished_run, "--source", unknown], "the character '\u00e9' (U+00E9) is not among"),
        ([finished_run, "--source", single], "needs at least 0 and 2. Use more text"),
        ([finished_run, "--block-size", 17], "--block-size=17 is longer than the context of"),
        ([finished_run, "--device", "bogus"], "--device bogus cannot be used here"),
        ([mixed_run, "--source", sources[0], "--held-out"], "is one source, and the run has 2"),
        ([streamed_run, "--source", sources[1], "--held-out"], "the text is not the run's: "),
    ]:
        assert sentence in refused(*words), words


def test_the_run_s_own_text_has_its_own_column_and_documents(capsys):
    for option in ("--column=body", "--documents=masked"):
        with pytest.raises(SystemExit):
            script.parse(["a-run", option])
        assert "has its own --column and --documents" in capsys.readouterr().err


def test_a_model_of_no_use_is_a_sentence(pretrained, other_text, refused, monkeypatch):
    nothing = lambda *_: torch.tensor([math.nan, 1.0], dtype=torch.float64)  # noqa: E731
    monkeypatch.setattr(script, "summed_loss", nothing)
    assert "the loss is nan nats per token" in refused(pretrained, "--source", other_text)


def test_the_command_prints_aligned_lines_and_nothing_else(finished_run, cache):
    words = [str(finished_run), *cache, "--device", "cpu"]
    result = runs.run(runs.command(*words, script="evaluate.py"), code=0)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line[:10].strip() for line in lines] == ["model", "text", "loss", "speed"]
    assert lines[2].startswith(f"loss      {reported(finished_run)['loss']:.4f} nats per character")
