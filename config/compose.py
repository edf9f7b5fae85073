"""From the command line to a checked `Config`, with Hydra's compose API.

`hydra.main` is not used: all processes would race to create a time-stamped output folder, and it
reports only the first mistake, with exit code 1.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.checks import problems
from config.hints import (
    EXPANDED,
    SWEEP_HINT,
    is_expanded,
    joined_options,
    quoted,
    quoted_argument,
    unknown_key,
    unknown_option,
)
from config.other_models import recipe_of
from config.problems import is_storable, shortened, why_not_storable
from config.removed import removed
from config.schema import TEXT_KEYS, Config, ConfigError, is_preset, other_model, tokenizer_of

CONFIG_DIR = Path(__file__).resolve().parent
GROUPS = ("data", "model", "experiment")
OWN_SIZES = (
    "model",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.activation_function",
)
"""The keys that set the sizes of our own model."""
ONE_OR_SEVERAL = ("run.tracker",)
"""List keys that also take a single text."""
BAD_VALUE = (HydraException, OmegaConfBaseException, ArithmeticError, TypeError)
"""Raised by Hydra and OmegaConf for a value of the wrong type."""

SHARE = 0.1
"""Work of an evaluation as a share of the steps since the one before."""
STEPS_OF_A_BATCH = 1 / 3
"""Work of a forward pass, in steps: a step also has a backward pass of twice the work."""
FEWEST, MOST = 5, 200


def batches_of_evaluation(eval_every: int, max_steps: int) -> int:
    """The default of `train.eval_batches`.

    It follows from the number of steps and not from a clock, so that the held-out loss of a run is
    the same on every machine.
    """
    steps = min(eval_every, max_steps)
    return max(FEWEST, min(MOST, round(SHARE * steps / STEPS_OF_A_BATCH)))


ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver(
    "data_name",
    lambda source, mix: "-".join(
        _name_of(str(source)) for source in ([part.source for part in mix] or [source])
    ),
    replace=True,
)
OmegaConf.register_new_resolver("eval_batches", batches_of_evaluation, replace=True)


def _name_of(source: str) -> str:
    """A name for a run of a source: the last part of a path or a URL, without the query."""
    last = re.split("[?#]", source)[0] if "://" in source else source
    return re.sub(r"[^\w.-]+", "-", Path(last).name).strip("-.") or "run"


def load_config(arguments: Sequence[str]) -> Config:
    """The configuration of `arguments` (Hydra overrides, `key=value`).

    Raises ConfigError with all mistakes, one sentence a line: malformed arguments, and invalid
    values of the others.
    """
    if any(map(is_expanded, arguments)):
        raise ConfigError(EXPANDED)  # what else is wrong comes from that
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        mistakes: list[str] = []
        try:
            config = OmegaConf.to_object(_compose_valid(arguments, mistakes))
        except (*BAD_VALUE, ValueError) as error:
            raise ConfigError("\n".join([*mistakes, _sentence(error)])) from error
    assert isinstance(config, Config)
    config.run.dir, config.data.cache_dir = map(
        _expand_home, (config.run.dir, config.data.cache_dir)
    )
    mistakes += problems(config) + list(_unused_sizes(arguments, config))
    mistakes += _unused_interval(arguments, config)
    if config.data.tokenizer is None:
        config.data.tokenizer = tokenizer_of(config.model)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config


def _unused_sizes(arguments: Sequence[str], config: Config) -> Iterator[str]:
    """A sentence for each size that is set although the model has its own."""
    if (other := other_model(config.model)) is None:
        return
    preset = f"model={other[1]}" if is_preset(config.model) else None
    named = preset or "=".join(other)
    for argument in arguments:
        key = argument.partition("=")[0]
        if preset is not None and key == "model.architecture":
            yield f"{argument} names a preset, which has its own optim.*. Write {preset} instead."
        if key in OWN_SIZES and argument != preset:
            yield f"{argument} has no effect with {named}, which has its own sizes. Leave it out."


def _unused_interval(arguments: Sequence[str], config: Config) -> list[str]:
    """A sentence for a number of steps that `snapshot.every_minutes` replaces."""
    given = [one for one in arguments if one.startswith("snapshot.every=")]
    if config.snapshot.every_minutes is None or not given:
        return []
    named = f"snapshot.every_minutes={config.snapshot.every_minutes:g}"
    return [f"{given[-1]} has no effect with {named}. Leave one of them out."]


def run_dir_of(arguments: Sequence[str]) -> Path | None:
    """`run.dir` according to the valid arguments; None if it cannot be derived."""
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            return Path(_expand_home(_compose_valid(arguments, []).run.dir))
        except (*BAD_VALUE, ValueError):
            return None


def _expand_home(path: str) -> str:
    """A path with `~` expanded, which shells do not do after `=`."""
    with suppress(RuntimeError):  # an unknown user, which config.checks reports
        return str(Path(path).expanduser()) if path.startswith("~") else path
    return path


def all_keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the schema, in the form of the command line."""
    for entry in fields(schema):
        default = getattr(schema(), entry.name)
        if is_dataclass(default):
            yield from all_keys(type(default), f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name


def _composed(arguments: Sequence[str]) -> DictConfig:
    composed = compose("train", overrides=list(arguments))
    OmegaConf.resolve(composed)
    return composed


def _compose_valid(arguments: Sequence[str], mistakes: list[str]) -> DictConfig:
    """Compose the valid arguments; sentences about the others are added to `mistakes`."""
    valid = _valid(list(joined_options(arguments)), _mistake_in_form, mistakes)
    valid = [_for_hydra(argument) for argument in valid]
    try:
        return _with_recipe(valid)
    except BAD_VALUE:  # only then compose each one alone, because that is slow
        return _with_recipe(_valid(valid, _mistake_in_value, mistakes))


def _with_recipe(arguments: list[str]) -> DictConfig:
    """Compose the arguments, with the recipe of a model that is not our own."""
    composed = _composed(arguments)
    recipe = recipe_of(composed.model)
    return composed if recipe is None else _composed([*arguments, f"recipe={recipe}"])


def _for_hydra(argument: str) -> str:
    """The argument, changed where Hydra would parse something else than its key takes."""
    key, text = argument.split("=", 1)
    value = OverridesParser.create().parse_override(argument).value()
    if key in ONE_OR_SEVERAL and isinstance(value, str):
        return f"{key}=[{text}]"
    if key in TEXT_KEYS and isinstance(value, int | float):  # 1.10 is not 1.1
        return f"{key}={quoted(text.strip())}"
    return argument


def _valid(
    arguments: Sequence[str], mistake_in: Callable[[str], str | None], mistakes: list[str]
) -> list[str]:
    found = [(argument, mistake_in(argument)) for argument in arguments]
    mistakes += [mistake for _, mistake in found if mistake is not None]
    return [argument for argument, mistake in found if mistake is None]


def _mistake_in_form(argument: str) -> str | None:
    """A mistake in the form of an argument, but not in its value; None if there is none."""
    keys = list(all_keys())
    if sentence := removed(*argument.lstrip("-+~").partition("=")[::2]):
        return sentence
    if argument.startswith("-"):
        return unknown_option(argument, [*keys, "model", "experiment"])
    key, _, text = argument.partition("=")
    if not key.strip() or ("=" not in argument and not argument.startswith("~")):
        return (
            f"'{argument}' is not of the form key=value. An argument with spaces needs quotes: "
            "'data.source=my text.txt'."
        )
    try:
        override = OverridesParser.create().parse_override(argument)
        value = override.value()
    except (HydraException, ValueError):  # ValueError: Python's limit for the digits of a number
        if key not in keys:
            return unknown_key(key, keys)
        return _unreadable(key, text) if key in TEXT_KEYS else _wrong_type(key, text)
    key = override.key_or_group
    if key not in (*keys, *GROUPS):
        return unknown_key(key, keys)
    if override.package is not None or override.is_add() or override.is_delete():
        return f"'{argument}' adds, moves or deletes a key. Keys are only set: write {key}=value."
    if key in TEXT_KEYS and not isinstance(value, str | int | float | None):
        return _unreadable(key, text)
    if override.is_sweep_override():
        return f"'{argument}' gives several values, and a run takes one. {SWEEP_HINT}"
    if key in GROUPS:
        return _unknown_option(key, str(value))
    if argument.endswith("=???"):
        return f"{key}=??? is not a value. Give it one, or leave it out."
    return None


def _unreadable(key: str, text: str) -> str:
    """The mistake of a text that Hydra parses as something else, with an argument that works."""

    def read(argument: str) -> object:
        return OmegaConf.select(_composed([argument]), key)

    if not is_storable(text):
        return f"{key}={text} {why_not_storable(text)}."
    argument = quoted_argument(key, text, read)
    remedy = "Use another name." if argument is None else f"In a shell write {argument} instead."
    return f"Hydra does not parse {key}={text} as a single text. {remedy}"


def _mistake_in_value(argument: str) -> str | None:
    """A mistake in the value of an argument with a known key; None if there is none."""
    try:
        _composed([argument])
    except BAD_VALUE as error:
        key, value = argument.split("=", 1)
        return _type_mistake(key, value, error)
    return None


def _unknown_option(group: str, value: str) -> str | None:
    options = sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))
    if value in options:
        return None
    near = difflib.get_close_matches(value, options, n=1)
    hint = f" The nearest is {near[0]}." if near else ""
    all_of_them = ", ".join(options)
    hint += f" For your own text use data.source={value}." if group == "data" else ""
    return f"{group}={value}: there is no config/{group}/{value}.yaml.{hint} All: {all_of_them}."


def _type_mistake(key: str, value: str, error: Exception) -> str:
    reason = _sentence(error)
    types = ("could not be converted", "is not a valid", "is incompatible with type hint")
    is_type = any(words in reason for words in types)
    if is_type or isinstance(error, ArithmeticError):
        return _wrong_type(key, value)
    return f"{key}={value} must be {_wanted(key)}: {reason}"


def _wrong_type(key: str, value: str) -> str:
    return f"{key}={shortened(value)} is not {_wanted(key)}."


def _wanted(key: str) -> str:
    section, name = key.split(".")
    declared = next(
        entry.type for entry in fields(getattr(Config(), section)) if entry.name == name
    )
    return {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "a text",
        "bool | None": "true, false or null",
        "bool | str": "true, false or a text that --help names",
        "list[MixPart]": "a list such as [{source:a,weight:0.7},{source:b,weight:0.3}]",
        "int | None": "a whole number or null",
        "float | None": "a number or null",
        "str | None": "a text or null",
        "list[float]": "a list of numbers such as [0.9,0.95]",
        "list[str]": 'a list of texts such as ["*.wte.*"]',
        "list[str] | None": "a list of texts such as [tensorboard,wandb], or null",
    }[str(declared)]


def _sentence(error: Exception) -> str:
    """The first line of a message from Hydra or OmegaConf, with one full stop."""
    return str(error.__cause__ or error).splitlines()[0].rstrip(".") + "."
