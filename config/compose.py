"""From the command line to a checked `Config`, by Hydra's compose API.

`hydra.main` is not used: every process would create a time-stamped output folder and race for it, a
mistake would be reported alone and with exit code 1.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.checks import is_storable, problems
from config.hints import joined_options, quoted, quoted_argument, unknown_key, unknown_option
from config.schema import TEXT_KEYS, Config, ConfigError
from data.urls import redact_urls

CONFIG_DIR = Path(__file__).resolve().parent
GROUPS = ("data", "model", "experiment")
BAD_VALUE = (HydraException, OmegaConfBaseException, ArithmeticError, TypeError)
"""What Hydra and OmegaConf raise for a value that its key does not take."""

ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver(
    "data_name",
    lambda source: _name_of(str(source)),
    replace=True,
)


def _name_of(source: str) -> str:
    """A run's name: the last part of a path or an address, but for what follows a `?` in that."""
    last = re.split("[?#]", source)[0] if "://" in source else source
    return re.sub(r"[^\w.-]+", "-", Path(last).name).strip("-.") or "run"


def load_config(arguments: Sequence[str]) -> Config:
    """The configuration that `arguments` (Hydra overrides, `key=value`) describe.

    Raises ConfigError with all the mistakes found, one sentence a line: those in the form of
    arguments, and those in the values of the others.
    """
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        mistakes: list[str] = []
        try:
            config = OmegaConf.to_object(_composed_of_sound(arguments, mistakes))
        except (*BAD_VALUE, ValueError) as error:
            raise ConfigError("\n".join([*mistakes, _sentence(error)])) from error
    assert isinstance(config, Config)
    config.run.dir, config.data.cache_dir = map(_at_home, (config.run.dir, config.data.cache_dir))
    mistakes += problems(config)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config


def run_dir_of(arguments: Sequence[str]) -> Path | None:
    """`run.dir` as those of the arguments that can be used say it; None where they do not."""
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            return Path(_at_home(_composed_of_sound(arguments, []).run.dir))
        except (*BAD_VALUE, ValueError):
            return None


def as_yaml(config: Config) -> str:
    """The resolved configuration as YAML, without the secrets of an address."""
    return OmegaConf.to_yaml(_public(config))


def as_plain(config: Config) -> dict[str, Any]:
    """The resolved configuration as dictionaries and lists, without the secrets of an address."""
    plain = OmegaConf.to_container(_public(config))
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _public(config: Config) -> DictConfig:
    """What may be stored, shown and uploaded."""
    data = replace(config.data, source=redact_urls(config.data.source))
    return OmegaConf.structured(replace(config, data=data))


def as_flat(config: Config) -> dict[str, Any]:
    """The resolved configuration by dotted key, lists as text: what trackers take."""
    return {
        f"{section}.{name}": str(value) if isinstance(value, list) else value
        for section, group in as_plain(config).items()
        for name, value in group.items()
    }


def _at_home(path: str) -> str:
    """A path with `~` made whole, which the shell does not do behind a `=`."""
    with suppress(RuntimeError):  # of a user who is not here: see training.checks
        return str(Path(path).expanduser()) if path.startswith("~") else path
    return path


def all_keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the schema, as it is written on the command line."""
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


def _composed_of_sound(arguments: Sequence[str], mistakes: list[str]) -> DictConfig:
    """What those of the arguments that can be used describe; the others go into `mistakes`."""
    sound = _sound(list(joined_options(arguments)), _mistake_in_form, mistakes)
    sound = [_as_typed(argument) for argument in sound]
    try:
        return _composed(sound)
    except BAD_VALUE:  # only now is each tried by itself: it is slow
        return _composed(_sound(sound, _mistake_in_value, mistakes))


def _as_typed(argument: str) -> str:
    """The argument with a text in quotes that Hydra would take for a number: 1.10 is not 1.1."""
    key, text = argument.split("=", 1)
    value = OverridesParser.create().parse_override(argument).value()
    return (
        f"{key}={quoted(text.strip())}"
        if isinstance(value, int | float) and key in TEXT_KEYS
        else argument
    )


def _sound(
    arguments: Sequence[str], mistake_in: Callable[[str], str | None], mistakes: list[str]
) -> list[str]:
    found = [(argument, mistake_in(argument)) for argument in arguments]
    mistakes += [mistake for _, mistake in found if mistake is not None]
    return [argument for argument, mistake in found if mistake is None]


def _mistake_in_form(argument: str) -> str | None:
    """What is wrong with one argument but for its value; None when nothing is."""
    keys = list(all_keys())
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
    except (HydraException, ValueError):  # a number of thousands of digits is Python's own
        if key not in keys:
            return unknown_key(key, keys)
        return _unreadable(key, text) if key in TEXT_KEYS else _wrong_type(key, text)
    key = override.key_or_group
    if override.package is not None or override.is_add() or override.is_delete():
        return f"'{argument}' adds, moves or deletes; every key exists, so write {key}=value."
    if key in GROUPS:
        if override.is_sweep_override():
            return f"'{argument}' names several values; a run takes one."
        return _unknown_option(key, str(value))
    if key not in keys:
        return unknown_key(key, keys)
    if key in TEXT_KEYS and not isinstance(value, str | int | float | None):
        return _unreadable(key, text)
    if override.is_sweep_override():
        return f"'{argument}' names several values; a run takes one."
    if argument.endswith("=???"):
        return f"{key}=??? is no value."
    return None


def _unreadable(key: str, text: str) -> str:
    """That Hydra does not read a value as one text, and the argument that it reads so."""

    def read(argument: str) -> object:
        return OmegaConf.select(_composed([argument]), key)

    argument = quoted_argument(key, text, read) if is_storable(text) else None
    remedy = "Name it otherwise." if argument is None else f"In a shell write {argument} instead."
    return f"{key}={text} is not one text to Hydra. {remedy}"


def _mistake_in_value(argument: str) -> str | None:
    """What is wrong with the value of one argument of a known key, taken alone."""
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
    hint += f" A text of your own is data.source={value}." if group == "data" else ""
    return f"{group}={value}: there is no config/{group}/{value}.yaml.{hint} All: {all_of_them}."


def _type_mistake(key: str, value: str, error: Exception) -> str:
    reason = _sentence(error)
    if "could not be converted" in reason or "is not a valid" in reason:
        return _wrong_type(key, value)
    if isinstance(error, ArithmeticError):
        return _wrong_type(key, value)
    return f"{key}={value} must be {_wanted(key)}: {reason}"


def _wrong_type(key: str, value: str) -> str:
    shortened = value if len(value) <= 60 else f"{value[:50]}... ({len(value)} characters)"
    return f"{key}={shortened} is not {_wanted(key)}."


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
        "int | None": "a whole number or null",
        "float | None": "a number or null",
        "str | None": "a text or null",
        "list[float]": "a list of numbers such as [0.9,0.95]",
    }[str(declared)]


def _sentence(error: Exception) -> str:
    """The first line of what Hydra or OmegaConf says, with one full stop."""
    return str(error.__cause__ or error).splitlines()[0].rstrip(".") + "."
