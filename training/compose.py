"""From the command line to a checked `Config`, by Hydra's compose API.

`hydra.main` is not used: every process would create a time-stamped output folder and race for it, a
mistake would be reported alone and with exit code 1.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.checks import problems
from training.config import Config, ConfigError

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"
GROUPS = ("data", "model", "experiment")

ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver(
    "data_name",
    lambda source: re.sub(r"[^\w.-]+", "-", Path(str(source)).name).strip("-.") or "run",
    replace=True,
)


def load_config(arguments: Sequence[str]) -> Config:
    """The configuration that `arguments` (Hydra overrides, `key=value`) describe.

    Raises ConfigError with all the mistakes found, one sentence a line: those in the form of
    arguments, and those in the values of the others.
    """
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        mistakes: list[str] = []
        try:
            config = OmegaConf.to_object(_composed_of_sound(arguments, mistakes))
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError("\n".join([*mistakes, _sentence(error)])) from error
    assert isinstance(config, Config)
    mistakes += problems(config)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config


def as_yaml(config: Config) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def as_plain(config: Config) -> dict[str, Any]:
    """The resolved configuration as dictionaries and lists."""
    plain = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def as_flat(config: Config) -> dict[str, Any]:
    """The resolved configuration by dotted key, lists as text: what trackers take."""
    return {
        f"{section}.{name}": str(value) if isinstance(value, list) else value
        for section, group in as_plain(config).items()
        for name, value in group.items()
    }


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
    sound = _sound(arguments, _mistake_in_form, mistakes)
    try:
        return _composed(sound)
    except (HydraException, OmegaConfBaseException):  # only now is each tried by itself: it is slow
        return _composed(_sound(sound, _mistake_in_value, mistakes))


def _sound(
    arguments: Sequence[str], mistake_in: Callable[[str], str | None], mistakes: list[str]
) -> list[str]:
    found = [(argument, mistake_in(argument)) for argument in arguments]
    mistakes += [mistake for _, mistake in found if mistake is not None]
    return [argument for argument, mistake in found if mistake is None]


def _mistake_in_form(argument: str) -> str | None:
    """What is wrong with one argument but for its value; None when nothing is."""
    if argument.startswith("-"):
        return f"There is no option '{argument}'. There are --help and --show, and key=value."
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return (
            f"'{argument}' is not of the form key=value. Values with spaces, commas, brackets, "
            "'~' or '=' need inner quotes: 'data.source=\"my text.txt\"'."
        )
    key = override.key_or_group
    if override.package is not None or override.is_add() or override.is_delete():
        return f"'{argument}' adds, moves or deletes; every key exists, so write {key}=value."
    if override.is_sweep_override():
        return f"'{argument}' names several values; a run takes one."
    if key in GROUPS:
        return _unknown_option(key, str(override.value()))
    keys = list(all_keys())
    if key not in keys:
        return f"{_unknown(key, keys)} All keys: --help."
    if argument.endswith("=???"):
        return f"{key}=??? is no value."
    return None


def _mistake_in_value(argument: str) -> str | None:
    """What is wrong with the value of one argument of a known key, taken alone."""
    try:
        _composed([argument])
    except (HydraException, OmegaConfBaseException) as error:
        key, value = argument.split("=", 1)
        return _type_mistake(key, value, error)
    return None


def _unknown(key: str, keys: list[str]) -> str:
    """The nearest by spelling; of a bare or misplaced name, the one in its right section."""
    name = key.rsplit(".", 1)[-1]
    near = [known for known in keys if known.rsplit(".", 1)[-1] == name]
    near = near or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not near:
        last = {known.rsplit(".", 1)[-1]: known for known in keys}
        near = [last[match] for match in difflib.get_close_matches(name, last, n=1, cutoff=0.5)]
    hint = f" The nearest key is {near[0]}." if near else ""
    return f"There is no key '{key}'.{hint}"


def _unknown_option(group: str, value: str) -> str | None:
    options = sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))
    if value in options:
        return None
    near = difflib.get_close_matches(value, options, n=1)
    hint = f" The nearest is {near[0]}." if near else ""
    all_of_them = ", ".join(options)
    return f"{group}={value}: there is no config/{group}/{value}.yaml.{hint} All: {all_of_them}."


def _type_mistake(key: str, value: str, error: Exception) -> str:
    section, name = key.split(".")
    declared = next(
        entry.type for entry in fields(getattr(Config(), section)) if entry.name == name
    )
    wanted = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "a text",
        "int | None": "a whole number or null",
        "str | None": "a text or null",
        "list[float]": "a list of numbers such as [0.9,0.95]",
    }.get(str(declared), str(declared))
    reason = _sentence(error)
    if "could not be converted" in reason or "is not a valid" in reason:
        return f"{key}={value} is not {wanted}."
    return f"{key}={value} must be {wanted}: {reason}"


def _sentence(error: Exception) -> str:
    """The first line of what Hydra or OmegaConf says, with one full stop."""
    return str(error.__cause__ or error).splitlines()[0].rstrip(".") + "."
