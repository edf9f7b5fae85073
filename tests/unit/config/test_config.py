"""The configuration: every shipped file loads, every mistake is named, every key is explained."""

from __future__ import annotations

import copy
import json
import os
import random
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from config.checks import RANGES, problems, value_of
from config.compose import all_keys, load_config, run_dir_of
from config.help import key_rows
from config.hints import ALIASES, LAUNCHER_OPTIONS, quoted
from config.schema import (
    TEXT_KEYS,
    Config,
    ConfigError,
    gpt_config,
)
from config.stored import as_plain, as_yaml
from model.family import parameter_count
from model.gpt import GPT
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
def test_every_accelerate_config_says_why_beside_each_key(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all("  # " in line for line in lines)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", tracked("accelerate_configs"), ids=str)
def test_no_key_can_be_set_in_both_files(path):
    names = {key.rsplit(".", 1)[-1] for key in all_keys()}
    assert not names & set(yaml.safe_load(path.read_text()))


def test_the_tuned_shakespeare_run_has_no_larger_model():
    tuned, reference = (
        load_config([f"experiment=shakespeare_char_cpu{end}"]) for end in ("", "_reference")
    )
    assert tuned.data == reference.data
    assert tuned.train.eval_batches is None
    parameters = [parameter_count(GPT(gpt_config(config, 65))) for config in (tuned, reference)]
    assert 0.7 < parameters[0] / parameters[1] <= 1
    assert tuned.train.max_steps * tuned.train.global_batch_size < 0.35 * 2000 * 12


def test_the_reference_shakespeare_run_is_the_well_known_one():
    config = load_config(["experiment=shakespeare_char_cpu_reference"])
    assert config.model.activation_function == "gelu_new"
    assert (config.model.n_layer, config.model.n_head, config.model.n_embd) == (4, 4, 128)
    assert (config.data.block_size, config.train.global_batch_size) == (64, 12)
    assert (config.train.max_steps, config.model.dropout) == (2000, 0.0)
    assert config.train.eval_batches is None


def test_the_larger_shakespeare_run_has_a_quarter_of_the_tokens():
    tuned = load_config(["experiment=shakespeare_char"])
    reference = load_config(["experiment=shakespeare_char_reference"])
    assert tuned.model == reference.model
    assert (reference.model.n_layer, reference.model.n_head, reference.model.n_embd) == (6, 6, 384)
    assert (reference.model.dropout, reference.optim.name) == (0.2, "adamw")
    assert (reference.train.max_steps, reference.train.global_batch_size) == (5000, 64)
    assert tuned.train.max_steps * tuned.train.global_batch_size < 0.27 * 5000 * 64
    assert tuned.data.block_size == reference.data.block_size == 256
    assert tuned.train.eval_batches is reference.train.eval_batches is None


def test_overrides_win_over_presets_and_experiments():
    config = load_config(["train.max_steps=7", "experiment=shakespeare_char", "model=tiny"])
    assert config.train.max_steps == 7
    assert config.model.n_layer == 4
    assert config.data.block_size == 256


def test_of_repeated_overrides_the_last_wins():
    words = ["train.seed=1", "train.seed=2", "train.seed=1"]
    assert load_config(words).train.seed == 1


def test_the_run_is_named_after_its_text():
    assert load_config(["data.source=/some/where/my text.txt.gz"]).run.dir == "out/my-text.txt.gz"
    assert load_config(["data.source=owner/name", "run.name=mine"]).run.dir == "out/mine"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.max_step", "train.max_steps"),
        ("max_steps", "train.max_steps"),
        ("optim.lr", "optim.learning_rate"),
        ("lr", "optim.learning_rate"),
        ("batch_size", "train.global_batch_size"),
        ("epochs", "train.max_steps"),
        ("output_dir", "run.dir"),
        ("dataset", "data.source"),
        ("steps", "train.max_steps"),
        ("seed", "train.seed"),
        ("resume", "snapshot.resume"),
        ("n_layers", "model.n_layer"),
        ("optim.learningrate", "optim.learning_rate"),
        ("model.max_steps", "train.max_steps"),
        ("data", None),
    ],
)
def test_an_unknown_key_names_the_nearest(key, nearest):
    (sentence,) = mistakes(f"{key}=3")
    if key != "data":
        assert f"no key '{key}'" in sentence
    if nearest is not None:
        assert f"The nearest key is {nearest}." in sentence


def test_a_key_that_is_added_is_an_unknown_key():
    """`+foo=1` must not advise `foo=1`, which does not exist either."""
    for form in ("+", "++", "~", ""):
        assert mistakes(f"{form}foo=1") == mistakes("foo=1")
        (sentence,) = mistakes(f"{form}optim.lr=1")
        assert "The nearest key is optim.learning_rate." in sentence
    (sentence,) = mistakes("+train.seed=1")
    assert "write train.seed=value" in sentence


def test_several_values_are_refused_with_a_loop_that_runs_them():
    for word in ("--multirun", "-m", "optim.learning_rate=0.1,0.2", "model=tiny,baby"):
        (sentence,) = mistakes(word)
        assert "for rate in 0.001 0.003; do accelerate launch train.py" in sentence, word


NUMBERS = [key for key in all_keys() if isinstance(value_of(Config(), key), float)]


@pytest.mark.parametrize("key", [*NUMBERS, "run.max_minutes"])
def test_what_is_no_number_is_called_so(key):
    (sentence,) = mistakes(f"{key}=nan")
    assert sentence == f"{key}=nan is not a number."


@pytest.mark.parametrize(
    "override",
    [
        "train.max_steps=1.5",
        "train.max_steps=null",
        "train.seed=-1",
        "train.seed=4294967296",
        "model.dropout=high",
        "model.dropout=nan",
        "model.activation_checkpointing=perhaps",
        "optim.betas=[0.9]",
        "optim.freeze=*.wte.*",
        "optim.freeze=null",
        "optim.betas=0.9",
        "optim.betas=[0.9,1.0]",
        "optim.learning_rate=0",
        "optim.learning_rate=inf",
        "optim.max_grad_norm=-1",
        "optim.schedule=linear",
        "optim.decay_fraction=0",
        "optim.decay_fraction=nan",
        "optim.min_learning_rate=1",
        "data.val_fraction=0",
        "data.val_fraction=1",
        "data.source=''",
        "data.block_size=0",
        "snapshot.keep=1",
        "snapshot.every=0",
        "run.name=''",
        "train.max_steps=1,2",
        "+train.max_steps=3",
        "~train.max_steps",
        "train=3",
        "train.max_steps",
        "=3",
        "",
        "--foo",
        "model=null",
        "~model",
        "+model=tiny",
        "model@foo=tiny",
        "model=tiny,baby",
        "experiment=null",
        "run.name=???",
        "run.dir=''",
        "run.collective_timeout_seconds=999999999999999",
        "train.global_batch_size=99999999999",
        "snapshot.resume=",
        "optim.betas=[[0.9],0.95]",
        "optim.weight_decay=" + "9" * 401,
        "train.seed=" + "9" * 5000,
        "model.n_embd=" + "9" * 4300,
        "model.n_layer=" + "1" + "0" * 30,
        "run.name=" + "x" * 256,
        "run.name=" + "\u00fc" * 128,
        "run.dir=" + "/x" * 2000,
        "data.cache_dir=" + "/x" * 2000,
        "snapshot.resume=" + "x" * 256,
        "run.dir='~nobody-of-this-name/x'",
        "data.source='~nobody-of-this-name/x'",
        "data.source='a\udcff.txt'",
        "data.source=a\udcff.txt",
        "run.dir=é",
        "run.dir='a\x1b[31mb'",
        "data.cache_dir='a\u202eb'",
        "train.max_steps=é",
        "epochs=é",
        "--config-name=x",
        "--resume",
    ],
)
def test_a_value_out_of_its_range_is_one_sentence(override):
    (sentence,) = mistakes(override)
    assert sentence.endswith(".")
    assert not sentence.endswith("..")


def test_all_mistakes_are_reported_together():
    assert len(mistakes("train.max_step=1", "optim.lr=2", "model.n_layer=x")) == 3
    assert len(mistakes("model.n_layer=0", "model.dropout=2", "snapshot.keep=1")) == 3
    assert len(mistakes("train.max_steps=-5", "train.seed=a", "foo=3")) == 3


def test_braces_that_a_shell_has_expanded_are_to_be_quoted():
    typed = "data.mix=[{source:a,weight:0.7},{source:b,weight:0.3}]"
    show = ["bash", "-c", f"printf '%s\\n' {typed}"]
    words = subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
    assert words != [typed]
    with pytest.raises(ConfigError) as caught:
        load_config([*words, "data.tokenizer=bpe:257"])
    advice = str(caught.value).partition("Quote it: ")[2].rstrip(".")
    assert advice == f"'{typed}'"
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {advice}"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(load_config([*words, "data.tokenizer=bpe:257"]).data.mix) == 2


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
    rows = key_rows()
    assert [key for key, _, _ in rows] == list(all_keys())
    assert all(meaning.endswith(".") for _, _, meaning in rows)


def test_every_whole_number_has_an_upper_bound():
    base = load_config([])
    whole = {
        f"{section.name}.{entry.name}": entry.type
        for section in fields(base)
        for entry in fields(getattr(base, section.name))
        if str(entry.type).startswith("int")
    }
    assert set(RANGES) == set(whole)
    for key in whole:
        section, name = key.split(".")
        for number in (10**16, 2**63, 10**30, -(10**30)):
            config = copy.deepcopy(base)
            setattr(getattr(config, section), name, number)
            assert any(f"{key}={number} must be at " in sentence for sentence in problems(config))


@pytest.mark.parametrize("text", ["1.10", "007", "1e3", "1_000", "true", "inf", "-5"])
def test_a_text_that_looks_like_a_number_stays_as_it_was_typed(text):
    assert load_config([f"run.name={text}"]).run.name == text


def test_null_is_no_text_where_a_key_can_be_null():
    assert load_config(["hub.repo_id=null"]).hub.repo_id is None
    (sentence,) = mistakes("run.name=null")
    assert "run.name=null must be a text" in sentence


@pytest.mark.parametrize(
    "text",
    [
        "é.txt",
        "a#b",
        "it's",
        "~/x",
        "a,b",
        "[a]",
        "a(1).txt",
        "{a}",
        "k=v",
        "a,b\\",
        'a\\"b',
        "a\nb",
    ],
)
def test_a_text_that_hydra_cannot_parse_survives_as_an_argument(text):
    with pytest.raises(ConfigError) as caught:
        load_config([f"data.source={text}"])
    argument = str(caught.value).split("In a shell write ")[1].removesuffix(" instead.")
    (word,) = shlex.split(argument)
    assert load_config([word]).data.source == text


def test_a_text_that_hydra_takes_needs_no_quotes():
    for text in ("a b.txt", "a:b", "*.txt", "a?b", "a%b", "C:\\x", "a@b", "a+b"):
        assert load_config([f"data.source={text}"]).data.source == text


def test_quotes_keep_any_text_to_the_letter():
    chosen, parser = random.Random(3), OverridesParser.create()
    for _ in range(500):
        text = "".join(chosen.choices('\\\\\\""\' ,=[]{}()~#;&$:*aé日\t', k=chosen.randrange(9)))
        assert parser.parse_override(f"run.name={quoted(text)}").value() == text


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        (["--max_steps=100"], "Write train.max_steps=100."),
        (["--train.max_steps", "100"], "Write train.max_steps=100."),
        (["--max-steps", "100"], "Write train.max_steps=100."),
        (["--lr", "-1"], "Write optim.learning_rate=-1."),
        (["-o", "x", "--output_dir", "my runs"], "Write 'run.dir=my runs'."),
        (["--resume", "train.seed=1"], "The key is snapshot.resume."),
        (["--resume", "--batch_size", "3"], "Write train.global_batch_size=3."),
        (["--model", "gpt2"], "Write model=gpt2."),
        (["--data=my.txt"], "Write data.source=my.txt."),
        (["data=my.txt"], "For your own text use data.source=my.txt."),
        (["--num_processes", "2"], "options of `accelerate launch`, before train.py"),
        (["precision=bf16"], "options of `accelerate launch`, before train.py"),
        (["--multirun"], "For a sweep, loop in the shell"),
        (["--verbose"], "The options are --help and --show; everything else is key=value."),
    ],
)
def test_an_option_of_another_program_names_our_key(words, argument):
    assert argument in mistakes(*words)[-1]


def test_every_alias_belongs_to_one_existing_key():
    aliases = [alias for names in ALIASES.values() for alias in names.split()]
    assert set(ALIASES) <= set(all_keys())
    assert len(set(aliases)) == len(aliases)
    assert not {*aliases, *LAUNCHER_OPTIONS.split()} & {key.split(".")[1] for key in all_keys()}
    assert not {*aliases} & {*LAUNCHER_OPTIONS.split()}


def test_a_home_folder_is_meant_by_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(["run.dir='~/runs/a'", "data.cache_dir='~'"])
    assert (config.run.dir, config.data.cache_dir) == ("/home/me/runs/a", "/home/me")
    assert load_config(["run.dir='./~/a'"]).run.dir == "./~/a"
    assert str(run_dir_of(["run.dir='~/a'", "train.max_stepz=5"])) == "/home/me/a"


def test_the_run_s_folder_is_known_whatever_else_is_wrong():
    for mistake in ("optim.weight_decay=" + "9" * 401, "optim.betas=[[0.9],1]", "--steps", "é"):
        assert str(run_dir_of(["run.dir=mine", mistake])) == "mine"


def test_secrets_of_an_address_are_not_stored():
    address = "https://me:word@host/some/text.txt?token=abc"
    config = load_config([f'data.source="{address}"'])
    assert config.data.source == address  # to fetch it
    assert config.run.dir == "out/text.txt"
    assert as_plain(config)["data"]["source"] == "https://host/some/text.txt?***"
    for stored in (as_yaml(config), json.dumps(as_plain(config))):
        assert not any(secret in stored for secret in ("word", "token=", "abc"))
    assert changed_values(as_plain(config), as_plain(config)) == []


def test_texts_are_the_keys_of_type_str():
    assert {"data.source", "run.name", "hub.repo_id", "run.project"} < set(TEXT_KEYS)
    assert "train.seed" not in TEXT_KEYS
