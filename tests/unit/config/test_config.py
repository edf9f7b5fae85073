"""The configuration: every shipped file loads, every mistake is named, every key is explained."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from config.compose import load_config, run_dir_of
from config.help import help_text, key_rows
from config.schema import KEYS, ConfigError
from config.stored import as_plain, as_yaml
from runs import ROOT
from snapshot.config_values import changed_values
from tracked import tracked


def mistakes(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    "path",
    [path for path in tracked("config", ".yaml") if path.parent.name != "config"],
    ids=lambda path: f"{path.parent.name}={path.stem}",
)
def test_every_shipped_file_makes_a_valid_configuration(path):
    named = f"{path.parent.name}={path.stem}"
    if path.parent.name == "recipe":  # which the key of a model chooses
        named = f"model.{path.stem}=owner/name"
    config = load_config([named])
    assert yaml.safe_load(as_yaml(config))["model"]["n_layer"] == config.model.n_layer


@pytest.mark.parametrize("path", tracked("accelerate_configs"), ids=str)
def test_no_key_can_be_set_in_both_files(path):
    names = {key.rsplit(".", 1)[-1] for key in KEYS}
    assert not names & set(yaml.safe_load(path.read_text()))


def test_overrides_win_over_presets_and_a_run_is_named_after_its_text():
    config = load_config(["train.max_steps=7", "experiment=shakespeare_char", "model=tiny"])
    assert config.train.max_steps == 7
    assert config.model.n_layer == 4
    assert config.data.block_size == 256
    assert load_config(["data.source=/some/where/my text.txt.gz"]).run.dir == "out/my-text.txt.gz"
    assert load_config(["data.source=owner/name", "run.name=mine"]).run.dir == "out/mine"


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("train.max_step=3", "The nearest key is train.max_steps."),
        ("max_steps=3", "The nearest key is train.max_steps."),
        ("xyzzy=1", "There is no key 'xyzzy'. All keys: --help."),
        ("--max_steps=100", "The nearest key is train.max_steps."),
        ("--resume", "The nearest key is snapshot.resume."),
        ("--model", "Write model=value."),
        ("--num_processes", "options of `accelerate launch`, before train.py"),
        ("precision=bf16", "options of `accelerate launch`, before train.py"),
        ("data=my.txt", "For your own text use data.source=my.txt."),
        ("model=gtp2", "The nearest is gpt2."),
        ("model=null", "there is no config/model/null.yaml"),
        ("model@foo=tiny", "There is no key 'model@foo'."),
        ("+train.seed=1", "Write train.seed=value."),
        ("run.name=???", "Write run.name=value."),
        ("text.txt", "A value with spaces needs quotes: 'data.source=my text.txt'."),
        ("", "is not of the form key=value"),
        ("optim.learning_rate=0.1,0.2", "optim.learning_rate=0.1,0.2 is not a number."),
        ("optim.learning_rate=0", "optim.learning_rate=0.0 must be above 0."),
        ("train.max_steps=1.5", "train.max_steps=1.5 is not a whole number."),
        ("train.micro_batch_size=many", "is not a whole number, or null."),
        ("hub.private=perhaps", "is not true or false."),
        ("optim.betas=0.9", "is not a list of numbers such as [0.9,0.95]."),
        ("optim.betas=[[0.9],0.95]", "must be two numbers"),
        ("optim.freeze=*.wte.*", "is not a list of texts"),
        ("train.seed=" + "9" * 5000, "(5000 characters) is not a whole number."),
        ("model.n_layer=1" + "0" * 30, "must be between 1 and 10000."),
        ("run.name=null", "run.name=null is not a text."),
        ("model.pretrained=${x}", "model.pretrained: Interpolation key 'x' not found."),
        ("run.name=${run.nam}", "run.name: Interpolation key 'run.nam' not found."),
        ("data.source='a\udcff.txt'", "bytes that are not valid UTF-8. Use another name."),
        ("run.name=" + "n" * 300, "has a name of more than 255 bytes. Use a shorter one."),
        ("run.dir='a\x1b[31mb'", "has control characters, or bytes"),
        ("hub.repo_id=me/run.git", "must have the form owner/name, or null."),
        ("snapshot.every_minutes=0", "must be between 1e-09 and 1000000, or null."),
        ("hub.url=hf://me", "must have the form hf://buckets/owner/name."),
    ],
)
def test_a_mistake_is_one_sentence_with_its_remedy(word, advice):
    (sentence,) = mistakes(word)
    assert advice in sentence
    assert sentence.endswith(".")
    assert not sentence.endswith("..")


def test_all_mistakes_are_reported_together():
    assert len(mistakes("train.max_step=1", "optim.lr=2", "model.n_layer=x")) == 3
    assert len(mistakes("model.n_layer=0", "model.dropout=2", "snapshot.keep=1")) == 3
    assert len(mistakes("train.max_steps=-5", "train.seed=a", "foo=3")) == 3


def test_braces_that_a_shell_has_expanded_are_to_be_quoted():
    def words_of(typed: str) -> list[str]:
        show = ["bash", "-c", f"printf '%s\\n' {typed}"]
        return subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()

    expanded = words_of("data.mix=[{source:a,weight:0.7},{source:b,weight:0.3}]")
    sentence = mistakes(*expanded, "data.tokenizer=bpe:257")[0]
    (quoted,) = re.findall(r"a list such as ('.*'), whose quotes", sentence)
    assert len(load_config([*words_of(quoted), "data.tokenizer=bpe:257"]).data.mix) == 2


def test_a_locale_without_the_characters_is_named():
    script = (
        "import sys; from config.compose import load_config\n"
        "try: load_config(sys.argv[1:])\n"
        "except ValueError as error: print(str(error).encode('ascii', 'backslashreplace').decode())"
    )
    words = [sys.executable, "-c", script, 'data.source="caf\u00e9.txt"', "run.name=caf\u00e9"]

    def said(utf8: str) -> str:
        ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": utf8}
        result = subprocess.run(
            words, env={**os.environ, **ascii_only}, cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    sentences = said("0").splitlines()
    assert len(sentences) == 2
    for sentence in sentences:
        assert "has characters that the encoding of this locale, ascii, lacks" in sentence
        assert sentence.endswith("set PYTHONUTF8=1 in the environment.")
    assert "encoding" not in said("1")


def test_every_key_has_a_meaning():
    rows = list(key_rows())
    assert [key for key, _, _ in rows] == list(KEYS)
    assert all(meaning.endswith(".") for _, _, meaning in rows)
    said = help_text()
    assert all(key in said for key in KEYS)


def test_the_help_does_not_wait_for_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['train.py', '--help']; import train"
    )
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == help_text() + "\n"


AS_TYPED = ["1.10", "007", "1e3", "1_000", "true", "inf", "-5"]
AS_TYPED += ["a b.txt", "a:b", "*.txt", "a?b", "a%b", "C:\\x", "a@b", "a+b"]


@pytest.mark.parametrize("text", AS_TYPED)
def test_a_text_stays_as_it_was_typed(text):
    assert load_config([f"data.source={text}"]).data.source == text


@pytest.mark.parametrize("text", ["é.txt", "it's", "~/x", "a,b", "[a]", "a(1).txt", "{a}", "k=v"])
def test_a_text_that_hydra_cannot_parse_is_refused_and_read_in_quotes(text):
    (sentence,) = mistakes(f"data.source={text}")
    assert sentence.startswith(f"Hydra reads data.source={text} as no text (")
    assert sentence.endswith("Write 'data.source=\"...\"'.")
    assert load_config([f'data.source="{text}"']).data.source == text


def test_the_run_s_folder_is_known_whatever_else_is_wrong():
    for mistake in ("optim.weight_decay=" + "9" * 401, "optim.betas=[[0.9],1]", "--steps", "é"):
        assert str(run_dir_of(["run.dir='~/a'", mistake])) == str(Path("~/a").expanduser())


def test_a_home_folder_is_meant_by_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(["run.dir='~/runs/a'", "data.cache_dir='~'"])
    assert (config.run.dir, config.data.cache_dir) == ("/home/me/runs/a", "/home/me")
    assert load_config(["run.dir='./~/a'"]).run.dir == "./~/a"


@pytest.mark.parametrize(
    ("words", "name", "rate", "steps"),
    [
        ("", "muon", 0.01, 1200),
        ("model.pretrained=NULL", "muon", 0.01, 1200),
        ("model.pretrained=a/b", "adamw", 3e-5, 1000),
        ("model.pretrained=a/b model.lora_rank=8", "adamw", 2e-4, 1000),
        ("model.architecture=a/b", "adamw", 3e-4, 2000),
        ("model.architecture=a/b optim.name=muon optim.learning_rate=1", "muon", 1, 2000),
        ("experiment=finetune_gpt2 model.pretrained=a/b", "adamw", 3e-5, 1000),
    ],
)
def test_a_model_that_is_not_ours_has_a_recipe_of_its_own(words, name, rate, steps):
    config = load_config(words.split())
    found = (config.optim.name, config.optim.learning_rate, config.train.max_steps)
    assert found == (name, rate, steps)


def test_an_optimizer_without_a_default_rate_needs_one():
    (sentence,) = mistakes("model.pretrained=a/b", "optim.name=muon")
    assert sentence == "optim.learning_rate=0.0 has no default for optim.name=muon. Set it."


def test_secrets_of_an_address_are_not_stored():
    address = "https://me:word@host/some/text.txt?token=abc"
    config = load_config([f'data.source="{address}"'])
    assert config.data.source == address  # to fetch it
    assert config.run.dir == "out/text.txt"
    assert as_plain(config)["data"]["source"] == "https://host/some/text.txt?***"
    for stored in (as_yaml(config), json.dumps(as_plain(config))):
        assert not any(secret in stored for secret in ("word", "token=", "abc"))
    assert changed_values(as_plain(config), as_plain(config)) == []
