"""`python -m snapshot space`: what is in the folder or the repo, what is refused, and the page."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer

import chats
import hubs
import runs
import web_browser
from browser.space import APP, GRADIO, REQUIREMENTS, _repo_in, make_space
from snapshot.__main__ import main
from snapshot.disk.folder import read_json
from snapshot.errors import SnapshotError

SPACE = "me/page"
STORED = f"spaces/{SPACE}"
"""As the loopback Hub names it."""
FILES = {
    "README.md",
    "app.py",
    "requirements.txt",
    "model/config.json",
    "model/model.safetensors",
    "model/special_tokens_map.json",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
}
START_SECONDS = 180


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def metadata(readme: str) -> dict:
    return yaml.safe_load(readme.split("---\n")[1])


def test_a_run_becomes_a_folder_with_program_and_model(finished_run, tmp_path):
    folder = tmp_path / "new" / "space"
    result = runs.run([*runs.MODULE, "space", str(finished_run), "--to", str(folder)])
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"space     {folder}\n"
    assert files_in(folder) == FILES
    newest = runs.snapshot(finished_run, 30)
    weights = "model.safetensors"
    assert (folder / "model" / weights).read_bytes() == (newest / weights).read_bytes()
    card = metadata((folder / "README.md").read_text())
    assert (card["sdk"], card["sdk_version"], card["app_file"]) == ("gradio", GRADIO, "app.py")
    assert card["title"] == read_json(newest / "state.json")["config"]["run"]["name"]
    AutoModelForCausalLM.from_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(folder / "model")


def test_a_folder_below_an_unknown_home_is_refused():
    with pytest.raises(SnapshotError, match="~nobody-here/x names the home of an unknown user"):
        make_space("a run", "~nobody-here/x", public=False)


def test_the_program_imports_what_its_requirements_name():
    imported = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(APP.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    packages = packages_distributions()
    needed = {packages[name][0] for name in imported - set(sys.stdlib_module_names)}
    named = {re.match(r"[\w-]+", line)[0] for line in REQUIREMENTS.splitlines()}
    assert {name.lower() for name in needed} == named
    assert version("gradio") == GRADIO  # of the card; Spaces install just this one


def test_what_is_there_is_never_replaced(finished_run, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "thesis.txt"):
        assert main(["space", str(finished_run), "--to", str(target)]) == 2
        assert f"--to {target} exists already. Name a new folder" in capsys.readouterr().err
    assert files_in(tmp_path) == {"thesis.txt"}


def test_a_full_disk_leaves_no_half_of_a_space(finished_run, tmp_path, monkeypatch, capsys):
    def fail(*_) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("browser.space.write_model", fail)
    assert main(["space", str(finished_run), "--to", str(tmp_path / "space")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_target_is_a_repo_unless_it_or_its_owner_is_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _repo_in("me/page") == "me/page"
    assert _repo_in("hf://me/page") == "me/page"
    for folder in ("page", "./me/page", "/me/page", "a/b/c"):
        assert _repo_in(folder) is None
    with pytest.raises(SnapshotError, match="names a revision"):
        _repo_in("me/page@main")
    with pytest.raises(SnapshotError, match="is not a Space"):
        _repo_in("hf://buckets/me/page")
    (tmp_path / "me").mkdir()
    assert _repo_in("me/page") is None
    assert _repo_in("hf://me/page") == "me/page"


def test_mistakes_on_the_command_line_are_sentences(finished_run, tmp_path, capsys):
    for words, sentence in [
        (["space", str(finished_run)], "the following arguments are required: --to"),
        (["list", str(finished_run), "--to", "x"], "unrecognized arguments: --to"),
        (["list", str(finished_run), "--public"], "unrecognized arguments: --public"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
        assert sentence in capsys.readouterr().err
    assert main(["space", str(tmp_path / "none"), "--to", str(tmp_path / "space")]) == 2
    assert "is neither a folder that exists" in capsys.readouterr().err


def test_one_commit_makes_a_private_gradio_space(near_hub, finished_run, capsys):
    assert main(["space", str(finished_run), "--to", SPACE]) == 0
    assert capsys.readouterr().out == f"space     {near_hub.endpoint}/spaces/{SPACE}\n"
    repo = near_hub.repo(STORED)
    assert repo.private
    assert len(repo.commits) == 2  # with that of its creation
    assert set(repo.files(repo.head)) == FILES | {".gitattributes"}
    assert near_hub.repo(SPACE) is None  # no model repo of that name


def test_a_second_space_replaces_the_model_and_nothing_foreign(near_hub, finished_run):
    make_space(str(finished_run), SPACE, public=False)
    repo = near_hub.repo(STORED)
    near_hub.commit_files(STORED, {"model/older.json": b"{}", "model/config.json": b"{}"})
    make_space(str(finished_run), SPACE, public=False)
    assert set(repo.files(repo.head)) == FILES | {".gitattributes"}
    assert b"gpt2" in repo.read(repo.head, "model/config.json")
    near_hub.commit_files(STORED, {"thesis.txt": b"mine"})
    with pytest.raises(SnapshotError, match=r"holds thesis.txt, which this command has not made"):
        make_space(str(finished_run), SPACE, public=False)
    assert "thesis.txt" in repo.files(repo.head)


@pytest.mark.parametrize("file", ["app.py", "index.html", "model/weights.bin"])
def test_a_space_of_somebody_else_s_program_is_refused(near_hub, finished_run, capsys, file):
    near_hub.create(STORED)
    near_hub.commit_files(STORED, {file: b"mine", "README.md": b"---\ntags: [chat]\n---\nMine."})
    assert main(["space", str(finished_run), "--to", SPACE]) == 2
    assert "which this command has not made and would replace" in capsys.readouterr().err
    assert near_hub.repo(STORED).read("main", file) == b"mine"


def test_nothing_becomes_public_without_the_word(near_hub, finished_run, capsys):
    near_hub.create(STORED, private=False)
    assert main(["space", str(finished_run), "--to", SPACE]) == 2
    assert "is public. Add --public" in capsys.readouterr().err
    assert "app.py" not in near_hub.repo(STORED).files("main")
    assert main(["space", str(finished_run), "--to", SPACE, "--public"]) == 0
    assert main(["space", str(finished_run), "--to", "me/another", "--public"]) == 0
    assert not near_hub.repo("spaces/me/another").private


def test_a_token_that_may_not_write_is_a_sentence(near_hub, finished_run, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", near_hub.add_token("hf_reader", role="read"))
    assert main(["space", str(finished_run), "--to", SPACE]) == 2
    assert "the Hub refuses (HTTP 403" in capsys.readouterr().err


def test_the_space_of_a_repo_links_its_card(near_hub, finished_run, tmp_path):
    hubs.seed(near_hub, runs.snapshot(finished_run, 30))
    make_space(hubs.REPO, str(tmp_path / "space"), public=False)
    card = metadata((tmp_path / "space" / "README.md").read_text())
    assert card["models"] == [hubs.REPO]
    make_space(hubs.REPO, SPACE, public=False)
    assert HfApi().space_info(SPACE).private


@pytest.mark.thorough
def test_adapters_are_merged_into_their_base(small, finished_run, tmp_path):
    own = [word for word in small if not word.startswith("model.n_")]
    words = [f"model.pretrained={finished_run}", "model.lora_rank=4", "optim.learning_rate=0.01"]
    run_dir = tmp_path / "run"
    result = runs.train(*own, *words, f"run.dir={run_dir}")
    assert result.returncode == 0, result.stderr
    make_space(str(run_dir), str(tmp_path / "space"), public=False)
    merged = tmp_path / "merged"
    assert main(["merge", str(run_dir), str(merged)]) == 0
    runs.assert_same_bits(tmp_path / "space" / "model", merged)


@contextlib.contextmanager
def running(space: Path):
    """The address of the program of a Space, as `python app.py` runs it on this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    log = space.parent / "app.log"
    environment = {
        **os.environ,
        "GRADIO_SERVER_PORT": str(port),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
    }
    with open(log, "w") as opened:
        process = subprocess.Popen(
            [sys.executable, "app.py"], cwd=space, env=environment, stdout=opened, stderr=opened
        )
    end = time.monotonic() + START_SECONDS
    try:
        while "Running on local URL" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.wait()


def focus(page, field: str) -> None:
    """Give a field the focus, once the page has it: it is drawn piece by piece."""
    page.wait_for(f"{field} && ({field}.focus(), document.activeElement === {field})")


def settings(page, length: int) -> None:
    """Set the length, and temperature 0."""
    for label, value in (("Length", length), ("Temperature", 0)):
        field = f"document.querySelector('input[type=number][aria-label*=\"{label}\"]')"
        focus(page, field)
        page.evaluate(f"{field}.select()")
        page.type(str(value))
        page.press("Tab")


@pytest.mark.thorough
def test_chromium_shows_the_text_that_sample_py_prints(finished_run, tmp_path):
    """As long as the context is; beyond it the page reads on from the last half."""
    words = [str(finished_run), "--prompt", "the ", "--length", "10", "--temperature", "0"]
    printed = runs.run(runs.command(*words, script="sample.py")).stdout.removesuffix("\n")
    make_space(str(finished_run), str(tmp_path / "space"), public=False)
    text = "document.querySelectorAll('textarea')[1].value"
    with running(tmp_path / "space") as address, web_browser.chromium(address) as page:
        settings(page, 10)
        focus(page, "document.querySelector('textarea')")
        page.type("the ")
        click(page, "Submit")
        page.wait_for(f"{text}.length >= {len(printed)}")
        assert page.evaluate(text) == printed
        settings(page, 100)
        click(page, "Submit")
        page.wait_for(f"{text}.length === 104")
        assert page.errors == []
        outside = [url for url in page.requested if not url.startswith((address, "data:"))]
        assert outside == []


def click(page, label: str) -> None:
    buttons = "[...document.querySelectorAll('button')]"
    button = f"{buttons}.find(one => one.textContent.trim().startsWith('{label}'))"
    page.wait_for(f"{button} !== undefined")
    page.evaluate(f"{button}.click()")


@pytest.mark.thorough
def test_chromium_shows_the_replies_of_a_chat_model(tmp_path):
    chats.make("gpt2", tmp_path / "model")
    make_space(str(tmp_path / "model"), str(tmp_path / "space"), public=False)
    said = "[...document.querySelectorAll('[data-testid=user]')].map(one => one.innerText.trim())"
    replies = said.replace("=user", "=bot")
    with running(tmp_path / "space") as address, web_browser.chromium(address) as page:
        page.wait_for("document.querySelector('textarea') !== null")
        click(page, "Additional inputs")
        settings(page, 20)
        for number, question in enumerate(("how is run 1?", "and run 2?"), 1):
            focus(page, "document.querySelector('textarea')")
            page.type(question)
            page.press("Enter")
            page.wait_for(f"{replies}.length === {number} && {replies}[{number - 1}].length > 0")
            page.wait_for("!document.querySelector('textarea').disabled")
        assert page.evaluate(said) == ["how is run 1?", "and run 2?"]
        assert "Error" not in page.evaluate("document.body.innerText")
