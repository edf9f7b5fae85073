"""`python -m snapshot space`: what is in the folder or the repo, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer

import families
import hubs
import runs
from browser.space import PAGE, _target_repo, _unknown_in, make_space
from data.subwords import SubwordTokenizer
from data.tokenizer import CharTokenizer
from snapshot.__main__ import main
from snapshot.disk.files import read_json, write_json
from snapshot.errors import SnapshotError
from spaces import in_node, random_model, space_of
from subword_folders import foreign_folder, sentencepiece_folder, trained

TOKENIZER = CharTokenizer("".join(sorted("\n abcdefghijklmnopqrstuvwxyz")))
SPACE = "me/page"
STORED = f"spaces/{SPACE}"
"""As the loopback Hub names it."""
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
MODEL_FILES = {
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("model") / "model", TOKENIZER)


def metadata(readme: str) -> dict:
    return yaml.safe_load(readme.split("---\n")[1])


def test_a_run_becomes_a_folder_with_page_and_model(finished_run, tmp_path):
    folder = tmp_path / "new" / "space"
    result = runs.run([*runs.MODULE, "space", str(finished_run), "--to", str(folder)])
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"space     {folder}\n"
    page = {path.name for path in PAGE.iterdir()}
    assert {path.name for path in folder.iterdir()} == page | MODEL_FILES | {
        "README.md",
        "space.json",
    }
    newest = runs.snapshot(finished_run, 30)
    assert (folder / "model.safetensors").read_bytes() == (
        newest / "model.safetensors"
    ).read_bytes()
    assert metadata((folder / "README.md").read_text())["sdk"] == "static"
    title = read_json(newest / "state.json")["config"]["run"]["name"]
    assert read_json(folder / "space.json") == {
        "title": title,
        "model": None,
        "beginning": "\n",
        "end_of_text": None,
        "weights": ["model.safetensors"],
        "files": sorted(path.name for path in folder.iterdir()),
    }
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)


@pytest.mark.thorough
def test_its_greedy_text_is_what_sample_py_prints(finished_run, tmp_path):
    words = [str(finished_run), "--prompt", "the run ", "--length", "60", "--temperature", "0"]
    printed = runs.run(runs.command(*words, script="sample.py")).stdout
    space = space_of(finished_run, tmp_path / "space")
    (ids,) = in_node(space, ("encode", "the run "))
    (tokens,) = in_node(space, ("tokens", ids, {"length": 60, "temperature": 0}))
    assert in_node(space, ("decode", [*ids, *tokens])) == [printed.removesuffix("\n")]


def test_the_default_model_has_less_than_5_mb_in_all(tmp_path):
    characters = CharTokenizer("".join(map(chr, range(32, 132))))
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64}
    space = space_of(random_model(tmp_path / "model", characters, **sizes), tmp_path / "space")
    assert sum(path.stat().st_size for path in space.iterdir()) < 5_000_000


def test_the_page_names_no_other_address():
    for path in PAGE.iterdir():
        lines = path.read_text().splitlines()
        named = [line for line in lines if "//" in line and "http" in line]
        assert all(line.strip().startswith("*") for line in named), named  # the format's, cited


def test_damage_is_found_before_anything_is_written(finished_run, tmp_path, capsys):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    for step in (10, 20, 30):
        with open(runs.snapshot(run_dir, step) / "model.safetensors", "r+b") as opened:
            opened.seek(-2, 2)
            opened.write(b"\1\1")
    assert main(["space", str(run_dir), "--to", str(tmp_path / "space")]) == 2
    assert "model.safetensors has changed" in capsys.readouterr().err
    assert not (tmp_path / "space").exists()


def test_what_the_page_cannot_compute_is_refused_in_a_sentence(tmp_path, capsys):
    llama = families.make("llama", tmp_path / "llama")
    other = families.make("gpt2 other", tmp_path / "other")
    pieces = families.make("gpt2", tmp_path / "pieces")
    sentencepiece_folder(pieces)
    capsys.readouterr()
    for source, sentence in [
        (llama, "is a llama that the page of a Space cannot run"),
        (other, "is a gpt2 that the page of a Space cannot run"),
        (pieces, "only supports characters and GPT-2's byte-level BPE"),
        (tmp_path / "none", "is neither a folder that exists"),
    ]:
        assert main(["space", str(source), "--to", str(tmp_path / "space")]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
        assert not (tmp_path / "space").exists()


def test_tokenizers_that_the_page_would_get_wrong_are_found(tmp_path):
    trained().save(tmp_path)
    content = read_json(tmp_path / "tokenizer.json")
    assert _unknown_in(content) is None
    SubwordTokenizer.from_folder(foreign_folder(tmp_path / "foreign")).save(tmp_path)
    assert _unknown_in(read_json(tmp_path / "tokenizer.json")) is None  # others' special tokens
    untyped = {name: entry for name, entry in content["model"].items() if name != "type"}
    assert _unknown_in({**content, "model": untyped}) is None  # as GPT-2's own file
    without = {text: i for text, i in content["model"]["vocab"].items() if text != "A"}
    words, model = content["pre_tokenizer"], content["model"]
    for change in (
        {"model": {**model, "type": "Unigram"}},
        {"model": {**model, "vocab": without}},
        {"model": {**model, "dropout": 0.1}},
        {"model": {**model, "end_of_word_suffix": "</w>"}},
        {"model": {**model, "continuing_subword_prefix": "##"}},
        {"model": {**model, "ignore_merges": True}},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {**words, "add_prefix_space": True}},
        {"pre_tokenizer": {**words, "use_regex": False}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"decoder": None},
        {"added_tokens": [{"content": "<x>", "special": False}]},
    ):
        assert _unknown_in({**content, **change}), change


def test_a_space_is_replaced_and_anything_else_is_kept(model, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    assert main(["space", str(model), "--to", str(other)]) == 2
    assert "is not a Space that this command made" in capsys.readouterr().err
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    assert main(["space", str(model), "--to", str(other / "thesis.txt")]) == 2
    assert "is a file" in capsys.readouterr().err
    space = space_of(model, tmp_path / "space")
    (space / "mine.js").write_text("")
    assert main(["space", str(model), "--to", str(space)]) == 2
    assert "this command did not make mine.js in it" in capsys.readouterr().err
    description = read_json(space / "space.json")
    write_json(space / "space.json", {**description, "files": [*description["files"], "mine.js"]})
    space_of(model, space)
    assert not (space / "mine.js").exists()
    # Older versions did not list them.
    del description["files"]
    write_json(space / "space.json", description)
    space_of(model, space)
    assert read_json(space / "space.json")["files"] == sorted(path.name for path in space.iterdir())


def test_a_full_disk_leaves_the_former_space(model, tmp_path, monkeypatch, capsys):
    space = space_of(model, tmp_path / "space")
    before = {path.name: path.read_bytes() for path in space.iterdir()}

    def fail(*_) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("browser.space.write_model", fail)
    assert main(["space", str(model), "--to", str(space)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in space.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["space"]


def test_a_target_is_a_repo_unless_it_or_its_owner_is_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _target_repo("me/page") == "me/page"
    assert _target_repo("hf://me/page") == "me/page"
    for folder in ("page", "./me/page", "/me/page", "a/b/c"):
        assert _target_repo(folder) is None
    with pytest.raises(SnapshotError, match="names a revision"):
        _target_repo("me/page@main")
    with pytest.raises(SnapshotError, match="is not a Space"):
        _target_repo("hf://buckets/me/page")
    (tmp_path / "me").mkdir()
    assert _target_repo("me/page") is None
    assert _target_repo("hf://me/page") == "me/page"


def test_mistakes_on_the_command_line_are_sentences(model, capsys):
    for words, sentence in [
        (["space", str(model)], "space needs --to"),
        (["list", str(model), "--to", "x"], "the other commands do not take it"),
        (["list", str(model), "--public"], "--public applies only to space"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
        assert sentence in capsys.readouterr().err


def test_one_commit_makes_a_private_static_space(near_hub, model, tmp_path, capsys):
    assert main(["space", str(model), "--to", SPACE]) == 0
    assert capsys.readouterr().out == f"space     {near_hub.endpoint}/spaces/{SPACE}\n"
    repo = near_hub.repo(STORED)
    assert repo.private
    assert len(repo.commits) == 2  # with that of its creation
    files = repo.files(repo.head)
    assert set(files) == {
        *MODEL_FILES,
        *(path.name for path in PAGE.iterdir()),
        *("README.md", "space.json", ".gitattributes"),
    }
    here = space_of(model, tmp_path / "space")
    for name in MODEL_FILES:
        assert repo.read(repo.head, name) == (here / name).read_bytes()
    assert near_hub.repo(SPACE) is None  # no model repo of that name


def test_a_second_space_replaces_files_and_deletes_old_ones(near_hub, model, tmp_path):
    make_space(str(model), SPACE, public=False)
    repo = near_hub.repo(STORED)
    described = json.loads(repo.read(repo.head, "space.json"))
    described["files"].append("older.js")
    older = {"older.js": b"", "space.json": json.dumps(described).encode(), "config.json": b"{}"}
    near_hub.commit_files(STORED, older)
    make_space(str(model), SPACE, public=False)
    assert "older.js" not in repo.files(repo.head)
    for mine in ("mine.js", "thesis.txt"):
        near_hub.commit_files(STORED, {mine: b"mine"})
        with pytest.raises(SnapshotError, match=f"holds {mine}, which this command has not made"):
            make_space(str(model), SPACE, public=False)
        assert mine in repo.files(repo.head)
        near_hub.commit_files(STORED, {}, [mine])
    assert json.loads(repo.read(repo.head, "config.json"))["model_type"] == "gpt2"


@pytest.mark.parametrize(
    ("file", "first"),
    [("app.py", "app.py"), ("index.html", "index.html"), ("space.json", "index.html")],
)
def test_a_space_of_somebody_else_s_program_is_refused(near_hub, model, capsys, file, first):
    near_hub.create(STORED)
    near_hub.commit_files(STORED, {file: b"mine"})
    assert main(["space", str(model), "--to", SPACE]) == 2
    assert f"holds {first}, but is not a Space that this command made" in capsys.readouterr().err
    assert near_hub.repo(STORED).read("main", file) == b"mine"


def test_nothing_becomes_public_without_the_word(near_hub, model, capsys):
    near_hub.create(STORED, private=False)
    assert main(["space", str(model), "--to", SPACE]) == 2
    assert "is public. Add --public" in capsys.readouterr().err
    assert "model.safetensors" not in near_hub.repo(STORED).files("main")
    assert main(["space", str(model), "--to", SPACE, "--public"]) == 0
    assert main(["space", str(model), "--to", "me/another", "--public"]) == 0
    assert not near_hub.repo("spaces/me/another").private


def test_a_token_that_may_not_write_is_a_sentence(near_hub, model, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", near_hub.add_token("hf_reader", role="read"))
    assert main(["space", str(model), "--to", SPACE]) == 2
    assert "the Hub refuses (HTTP 403" in capsys.readouterr().err


def test_the_space_of_a_repo_links_its_card(near_hub, finished_run, tmp_path):
    hubs.seed(near_hub, runs.snapshot(finished_run, 30))
    folder = tmp_path / "space"
    make_space(hubs.REPO, str(folder), public=False)
    assert read_json(folder / "space.json")["model"] == f"{near_hub.endpoint}/{hubs.REPO}"
    assert metadata((folder / "README.md").read_text())["models"] == [hubs.REPO]
    make_space(hubs.REPO, SPACE, public=False)
    info = HfApi().space_info(SPACE)
    assert info.private


@pytest.mark.thorough
def test_adapters_are_merged_into_their_base(small, finished_run, tmp_path):
    own = [word for word in small if not word.startswith("model.n_")]
    words = [f"model.pretrained={finished_run}", "model.lora_rank=4", "optim.learning_rate=0.01"]
    run_dir = tmp_path / "run"
    result = runs.train(*own, *words, f"run.dir={run_dir}")
    assert result.returncode == 0, result.stderr
    space = space_of(run_dir, tmp_path / "space")
    merged = tmp_path / "merged"
    assert main(["merge", str(run_dir), str(merged)]) == 0
    runs.assert_same_bits(space, merged)
