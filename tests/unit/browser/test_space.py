"""`python -m snapshot space`: what is in the folder or the repo, what is refused, and the page."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import Page, expect, sync_playwright
from transformers import AutoModelForCausalLM, AutoTokenizer

import chats
import hubs
import runs
from browser.space import APP, GRADIO, REQUIREMENTS, make_space
from snapshot.__main__ import main
from snapshot.disk.folder import read_json

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
SECONDS = 180


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

    monkeypatch.setattr("snapshot.named_model.NamedModel.write", fail)
    assert main(["space", str(finished_run), "--to", str(tmp_path / "space")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_mistakes_on_the_command_line_are_sentences(finished_run, tmp_path, capsys):
    for words, sentence in [
        (["space", str(finished_run)], "the following arguments are required: --to"),
        (["list", str(finished_run), "--to", "x"], "unrecognized arguments: --to"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
        assert sentence in capsys.readouterr().err
    assert main(["space", str(tmp_path / "none"), "--to", str(tmp_path / "space")]) == 2
    assert "is neither a folder that exists" in capsys.readouterr().err
    assert main(["space", str(finished_run), "--to", "~nobody-here/x"]) == 2
    assert "~nobody-here/x names the home of an unknown user" in capsys.readouterr().err
    assert main(["space", str(finished_run), "--to", "hf://me/page"]) == 2
    assert "not a folder. Name a new one, and upload it: hf upload" in capsys.readouterr().err


def test_the_space_of_a_repo_links_its_card(near_hub, finished_run, tmp_path):
    hubs.seed(near_hub, runs.snapshot(finished_run, 30))
    make_space(hubs.REPO, str(tmp_path / "space"))
    card = metadata((tmp_path / "space" / "README.md").read_text())
    assert card["models"] == [hubs.REPO]


@pytest.mark.thorough
def test_adapters_are_merged_into_their_base(small, finished_run, tmp_path):
    own = [word for word in small if not word.startswith("model.n_")]
    words = [f"model.pretrained={finished_run}", "model.lora_rank=4", "optim.learning_rate=0.01"]
    run_dir = tmp_path / "run"
    result = runs.train(*own, *words, f"run.dir={run_dir}")
    assert result.returncode == 0, result.stderr
    make_space(str(run_dir), str(tmp_path / "space"))
    merged = tmp_path / "merged"
    assert main(["merge", str(run_dir), str(merged)]) == 0
    runs.assert_same_bits(tmp_path / "space" / "model", merged)


@contextlib.contextmanager
def shown(space: Path):
    """The page of a Space in Chromium, as `python app.py` serves it on this machine."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium")
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
    end = time.monotonic() + SECONDS
    try:
        while "Running on local URL" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        with sync_playwright() as browsers:
            browser = browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page, asked = browser.new_page(), []
            page.set_default_timeout(SECONDS * 1000)
            page.on("request", lambda request: asked.append(request.url))
            address = f"http://127.0.0.1:{port}/"
            page.goto(address)
            yield page
            assert [url for url in asked if not url.startswith((address, "data:"))] == []
            browser.close()
    finally:
        process.kill()
        process.wait()


def set_fields(page: Page, length: int) -> None:
    """Set the length, and temperature 0."""
    for label, value in (("Length", length), ("Temperature", 0)):
        field = page.get_by_label(label).and_(page.locator("input[type=number]"))
        field.fill(str(value))
        field.press("Tab")


def wait_for_length(page: Page, length: int) -> None:
    pattern = re.compile(f"^[\\s\\S]{{{length}}}$")
    expect(page.get_by_label("Text", exact=True)).to_have_value(pattern, timeout=SECONDS * 1000)


@pytest.mark.thorough
def test_chromium_shows_the_text_that_sample_py_prints(finished_run, tmp_path):
    """As long as the context is; beyond it the page reads on from the last half."""
    words = [str(finished_run), "--prompt", "the ", "--length", "10", "--temperature", "0"]
    printed = runs.run(runs.command(*words, script="sample.py")).stdout.removesuffix("\n")
    make_space(str(finished_run), str(tmp_path / "space"))
    with shown(tmp_path / "space") as page:
        page.get_by_label("Prompt").fill("the ")
        set_fields(page, 10)
        page.get_by_role("button", name="Submit").click()
        wait_for_length(page, len(printed))
        assert page.get_by_label("Text", exact=True).input_value() == printed
        set_fields(page, 100)
        page.get_by_role("button", name="Submit").click()
        wait_for_length(page, 104)


@pytest.mark.thorough
def test_chromium_shows_the_replies_of_a_chat_model(tmp_path):
    chats.make("gpt2", tmp_path / "model")
    make_space(str(tmp_path / "model"), str(tmp_path / "space"))
    questions = ["how is run 1?", "and run 2?"]
    with shown(tmp_path / "space") as page:
        page.get_by_text("Additional inputs").click()
        set_fields(page, 20)
        for number, question in enumerate(questions, 1):
            page.get_by_role("textbox").last.fill(question)
            page.keyboard.press("Enter")
            replies = page.get_by_test_id("bot")
            expect(replies).to_have_count(number, timeout=SECONDS * 1000)
            expect(replies.last).to_have_text(re.compile(r"\S"), timeout=SECONDS * 1000)
        assert [text.strip() for text in page.get_by_test_id("user").all_inner_texts()] == questions
        assert "Error" not in page.inner_text("body")
