"""evaluate.py: the loss of any model over a text; of a run, the run's own number."""

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
from evaluations import T, assert_as_reported, changed, reported
from snapshot.disk.folder import read_json
from store.kinds import open_store

"""Tokens of a window."""


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


def test_the_loss_of_a_run_is_the_one_that_it_has_reported(finished_run, figures):
    found = figures(finished_run)
    assert_as_reported(found, finished_run)
    state = read_json(runs.snapshot(finished_run, 30) / "state.json")["data"]
    assert found["fingerprint"] == state["fingerprint"]
    assert found["tokens"] == found["tokens_of_text"] == state["held_out_tokens"] - 1
    assert (found["unit"], found["block_size"]) == ("character", T)


def test_neither_batch_nor_place_changes_the_loss(
    finished_run, text_file, figures, refused, tmp_path
):
    copy = shutil.copytree(runs.snapshot(finished_run, 30), tmp_path / "step-00000030")
    text = ["--source", text_file, "--held-out"]  # a snapshot does not say where that lies
    for words in (["--batch-size", 3], ["--batch-size", 10**9]):
        assert_as_reported(figures(copy, *words, *text), finished_run)
    assert "add --source <folder>/text.txt --held-out" in refused(copy)


def test_an_earlier_snapshot_has_another_loss(finished_run, figures):
    found = figures(runs.snapshot(finished_run, 20))
    assert found["step"] == 20
    assert abs(found["loss"] - reported(finished_run)["loss"]) > 1e-3


def trained(small, folder, *words: str):
    run_dir = folder / "run"
    result = runs.train(*small, *words, f"run.dir={run_dir}", "train.max_steps=2")
    assert result.returncode == 0, result.stderr
    return run_dir


def test_a_partial_evaluation_with_subwords_has_the_run_s_number(small, figures, tmp_path):
    run_dir = trained(small, tmp_path, "data.tokenizer=bpe:300", "train.eval_batches=2")
    found = figures(run_dir)
    assert_as_reported(found, run_dir)
    assert found["unit"] == "token"
    assert found["tokens"] == 2 * 8 * T < found["tokens_of_text"]
    everything = figures(run_dir, "--batches", 10**6)
    assert everything["tokens"] == everything["tokens_of_text"]
    assert everything["loss"] != found["loss"]


def test_a_run_from_a_model_of_the_hub_has_its_own_number(small, pretrained, figures, tmp_path):
    own = [word for word in small if not word.startswith("model.n_")]
    run_dir = trained(own, tmp_path, f"model.pretrained={pretrained}")
    assert_as_reported(figures(run_dir), run_dir)


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


def test_all_of_another_text_counts_and_so_do_many_documents(finished_run, figures, tmp_path):
    """With a hundred documents a run's split would be between two of them."""
    table = tmp_path / "rows.jsonl"
    rows = [{"body": "the step was lost and the run goes on"}] * 120
    table.write_text("\n".join(map(json.dumps, rows)))
    found = figures(finished_run, "--source", table, "--column", "body")
    assert found["tokens"] == 120 * len(rows[0]["body"] + "\n") - 1
    assert found["loss"] == pytest.approx(found["bits_per_byte"] * math.log(2), rel=1e-9)


def test_the_run_s_text_elsewhere_is_held_out_as_in_the_run(
    finished_run, text_file, other_text, figures, refused, tmp_path
):
    moved = shutil.copy(text_file, tmp_path / "moved.txt")
    assert_as_reported(figures(finished_run, "--source", moved, "--held-out"), finished_run)
    assert "the text is not the run's: " in refused(
        finished_run, "--source", other_text, "--held-out"
    )


def test_a_repo_has_the_number_of_its_run(
    near_hub, finished_run, text_file, figures, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hubs.seed(near_hub, runs.snapshot(finished_run, 10), runs.snapshot(finished_run, 30))
    found = figures(hubs.REPO, "--source", text_file, "--held-out")
    assert_as_reported(found, finished_run)
    assert found["model"].startswith(f"{hubs.REPO}@")


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
    read_bytes = type(store).read_bytes

    def read_once(self, path, *more):
        assert not path.endswith(".safetensors")
        return read_bytes(self, path, *more)

    for _ in range(2):
        found = figures(f"{store.url}@{older}", *whole)
        assert found["loss"] == figures(runs.snapshot(finished_run, 10), *whole)["loss"]
        monkeypatch.setattr(type(store), "read_bytes", read_once)


def test_a_model_of_the_hub_is_evaluated(
    near_hub, pretrained, other_text, figures, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    commit = hubs.publish(near_hub, "them/model", pretrained)
    found = figures("them/model", "--source", other_text)
    assert found["model"] == f"them/model@{commit[:12]}"
    assert found["loss"] == figures(pretrained, "--source", other_text)["loss"]


def test_an_address_that_a_repo_names_is_not_opened(
    near_hub, finished_run, refused, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = changed(finished_run, tmp_path, source="http://127.0.0.1:9/text.txt")
    hubs.put(near_hub, folder, 30)
    assert "add --source http://127.0.0.1:9/text.txt --held-out" in refused(hubs.REPO)


@pytest.mark.parametrize(
    "data",
    [
        {"source": 7},
        {"source": "${oc.env:HOME}"},
        {"block_size": 0},
        {"block_size": True},
        {"val_fraction": 1.0},
        {"tokenizer": ["char"]},
    ],
    ids=str,
)
def test_a_state_that_no_run_writes_is_a_sentence(finished_run, refused, tmp_path, data):
    assert "has no valid configuration in its state: " in (
        said := refused(changed(finished_run, tmp_path, **data))
    )
    assert os.environ["HOME"] not in said.replace(str(tmp_path), "")


def test_a_text_that_has_changed_is_a_sentence(small, finished_run, other_text, refused, tmp_path):
    folder = changed(finished_run, tmp_path, source=str(other_text))
    assert "the text is not the run's: " in refused(folder)


def test_mistakes_are_sentences(finished_run, pretrained, other_text, refused, tmp_path):
    unknown, single = tmp_path / "unknown.txt", tmp_path / "single.txt"
    unknown.write_text("the run is lost \u00e9\n" * 9)
    single.write_text("t")
    for words, sentence in [
        ([tmp_path / "none"], "is neither a folder that exists nor a repo"),
        ([tmp_path], "manifest.json"),
        ([pretrained], "Name a text with --source."),
        ([pretrained, "--source", other_text, "--held-out"], "with --source, without --held-out"),
        ([finished_run, "--source", tmp_path / "none.txt"], "--source "),
        ([finished_run, "--source", unknown], "the character '\u00e9' (U+00E9) is not among"),
        ([finished_run, "--source", single], "at least 2. Use more text."),
        ([finished_run, "--block-size", 17], "--block-size=17 is longer than the context of"),
        ([finished_run, "--device", "bogus"], "--device bogus cannot be used here"),
    ]:
        assert sentence in refused(*words), words


@pytest.mark.parametrize("option", ["--batches", "--batch-size", "--block-size"])
def test_a_count_that_is_none_is_refused_by_the_command_line(option, capsys):
    with pytest.raises(SystemExit) as ended:
        script.parse(["a-run", option, "0"])
    assert ended.value.code == 2
    assert f"argument {option}: 0 is not between 1 and" in capsys.readouterr().err


def test_a_model_of_no_use_is_a_sentence(pretrained, other_text, refused, monkeypatch):
    nothing = lambda *_: torch.tensor([math.nan, 1.0], dtype=torch.float64)  # noqa: E731
    monkeypatch.setattr(script, "summed_loss", nothing)
    assert "the loss is nan nats per token" in refused(pretrained, "--source", other_text)


def test_ctrl_c_has_its_code(finished_run, cache, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "summed_loss", interrupted)
    monkeypatch.setattr("data.command._discard_output", lambda: None)
    assert script.main([str(finished_run), *cache]) == 130


def test_the_command_prints_aligned_lines_and_nothing_else(finished_run, cache):
    words = [str(finished_run), *cache, "--device", "cpu"]
    result = runs.run(runs.command(*words, script="evaluate.py"))
    assert result.returncode == 0
    assert result.stderr == ""
    record, lines = reported(finished_run), result.stdout.splitlines()
    assert [line[:10].strip() for line in lines] == ["model", "text", "loss", "speed", "trained"]
    loss, per_byte = record["loss"], record["bits_per_byte"]
    assert lines[2].startswith(
        f"loss      {loss:.4f} nats per character, {per_byte:.4f} bits per byte, perplexity "
    )
    assert lines[2].endswith(" held-out characters")
