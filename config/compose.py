"""From the command line to a checked `Config`.

Hydra parses each argument and composes the files of config/. `hydra.main` is not used: all
processes would race to create its output folder, and it reports only the first mistake, with exit
code 1. No room that imports torch is imported here, so that `--help` takes less than a second.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.printable import shortened
from config.removed import removed
from config.schema import KEYS, TEXT_KEYS, Config, ConfigError, is_preset, other_model, tokenizer_of

CONFIG_DIR = Path(__file__).resolve().parent
GROUPS = ("data", "model", "experiment")
OWN_SIZES = ("model", "model.n_layer", "model.n_head", "model.n_embd", "model.activation_function")
"""The keys that set the sizes of our own model."""
BAD_VALUE = (HydraException, OmegaConfBaseException, ValueError, ArithmeticError, TypeError)
"""Raised by Hydra and OmegaConf for a value that cannot be parsed or is of another type."""
ALIKE = 0.75
"""How similar a name is to that of a key, at least, to be taken for it."""
Setting = tuple[str, str, Any]
"""Key, text and value of an argument."""
MIX = "'data.mix=[{source:a,weight:0.7},{source:b,weight:0.3}]'"
TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list[float]": "a list of numbers such as [0.9,0.95]",
    "list[str]": 'a list of texts such as ["*.wte.*"]',
    "list[MixPart]": f"a list such as {MIX}, whose quotes stop the shell from expanding braces",
}
"""By type of a key, what its value has to be."""


def load_config(arguments: Sequence[str]) -> Config:
    """The configuration of `arguments` (Hydra overrides, `key=value`).

    Raises ConfigError with all mistakes, one sentence a line: malformed arguments, and invalid
    values of the others.
    """
    from config.checks import problems  # imports torch

    mistakes: list[str] = []
    try:
        composed, mistakes = compose_valid(arguments)
        config = OmegaConf.to_object(composed)
    except BAD_VALUE as error:  # a reference such as ${run.nam} or ${oc.env:SEED}
        key = getattr(error, "full_key", None) or "the configuration"
        mistakes.append(f"{key}: {str(error).splitlines()[0].rstrip('.')}.")
        raise ConfigError("\n".join(mistakes)) from error
    assert isinstance(config, Config)
    config.run.dir = _at_home(config.run.dir)
    config.data.cache_dir = _at_home(config.data.cache_dir)
    mistakes += [*problems(config), *_without_effect(arguments, config)]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    config.data.tokenizer = config.data.tokenizer or tokenizer_of(config.model)
    return config


def run_dir_of(arguments: Sequence[str]) -> Path | None:
    """`run.dir` according to the valid arguments; None if it cannot be derived."""
    try:
        return Path(_at_home(compose_valid(arguments)[0].run.dir))
    except BAD_VALUE:
        return None


def _at_home(path: str) -> str:
    """A path with `~` expanded, which shells do not do after `=`."""
    return os.path.expanduser(path)  # noqa: PTH111  Path raises for an unknown user


def compose_valid(arguments: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The configuration of the valid arguments, and a sentence about each other argument."""
    settings, mistakes = [], []
    for argument in arguments:
        try:
            settings.append(_parse(argument))
        except ConfigError as error:
            mistakes.append(str(error))
    composed, wrong = _composed(settings)
    other = other_model(composed.model)
    if other is not None and not is_preset(composed.model):
        composed, wrong = _composed(settings, f"recipe={other[0].removeprefix('model.')}")
    return composed, mistakes + wrong


def _composed(settings: list[Setting], *recipe: str) -> tuple[DictConfig, list[str]]:
    """The files that the settings name with their values, and a sentence for each wrong type."""
    groups = [f"{key}={text}" for key, text, _ in settings if key in GROUPS]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        composed = compose("train", overrides=[*groups, *recipe])
    mistakes = []
    for key, text, value in settings:
        try:
            if key not in GROUPS:
                OmegaConf.update(composed, key, value)
        except BAD_VALUE:
            mistakes.append(_wrong_type(key, text))
    return composed, mistakes


def _parse(argument: str) -> Setting:
    """What Hydra reads in an argument. Raises ConfigError for one that is malformed."""
    name, mark, text = argument.partition("=")
    key = name.lstrip("+~-")
    if sentence := removed(key, text):
        raise ConfigError(sentence)
    if not mark and key not in KEYS and not name.startswith("-"):
        remedy = "A value with spaces needs quotes: 'data.source=my text.txt'"
        raise ConfigError(f"'{argument}' is not of the form key=value. {remedy}.")
    if key not in (*KEYS, *GROUPS):
        raise ConfigError(f"There is no key '{name}'. {_nearest(key)}")
    if not mark or name != key or text == "???":
        raise ConfigError(f"'{argument}' sets no key. Write {key}=value.")
    try:
        value = OverridesParser.create().parse_override(argument).value()
        if key in TEXT_KEYS and not isinstance(value, str | int | float | None):
            raise TypeError("it is a list or a mapping")
    except BAD_VALUE as error:
        raise ConfigError(_unreadable(key, text, error)) from None
    if key in GROUPS:
        _refuse_unknown_file(key, value if isinstance(value, str) else text)
    if key in TEXT_KEYS and isinstance(value, int | float):
        value = text.strip()  # 1.10 is not 1.1
    return key, text, [value] if key == "run.tracker" and isinstance(value, str) else value


def _nearest(name: str) -> str:
    """What to write instead of a name that is no key."""
    name = name.replace("-", "_")
    last = name.rpartition(".")[2]
    ends = {key.rpartition(".")[2]: key for key in (*KEYS, *GROUPS)}
    near = [ends[last]] if last in ends else difflib.get_close_matches(name, KEYS, 1, ALIKE)
    near += [ends[end] for end in difflib.get_close_matches(last, ends, 1, ALIKE)]
    if near:
        return f"The nearest key is {near[0]}. All keys: --help."
    where = "options of `accelerate launch`, before train.py"
    return f"All keys: --help. Processes, machines, precision and compilation are {where}."


def _unreadable(key: str, text: str, why: Exception) -> str:
    """The mistake of a value that Hydra does not parse, with its own message."""
    from config.checks import why_not_storable  # imports torch

    if key not in TEXT_KEYS:
        return _wrong_type(key, text)
    if (reason := why_not_storable(text)) is not None:
        return f"{key}={text} {reason}."
    what = str(why).splitlines()[0].rstrip(".")
    return f"Hydra reads {key}={shortened(text)} as no text ({what}). Write '{key}=\"...\"'."


def _wrong_type(key: str, text: str) -> str:
    wanted, mark, _ = KEYS[key].partition(" | None")
    return f"{key}={shortened(text)} is not {TYPES[wanted]}{', or null' * (mark != '')}."


def _refuse_unknown_file(group: str, value: str) -> None:
    files = sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))
    if value in files:
        return
    near = [f" The nearest is {name}." for name in difflib.get_close_matches(value, files, 1)]
    own = f" For your own text use data.source={value}." if group == "data" else ""
    what = f"{group}={value}: there is no config/{group}/{value}.yaml."
    raise ConfigError(f"{what}{''.join(near)}{own} All: {', '.join(files)}.")


def _without_effect(arguments: Sequence[str], config: Config) -> Iterator[str]:
    """A sentence for each argument that another one overrules."""
    other, minutes = other_model(config.model), config.snapshot.every_minutes
    preset = f"model={config.model.architecture}" if is_preset(config.model) else None
    overruled: dict[str, str] = {}
    if other is not None:
        overruled |= dict.fromkeys(OWN_SIZES, f"{preset or '='.join(other)}, which has its sizes")
    if minutes is not None:
        overruled["snapshot.every"] = f"snapshot.every_minutes={minutes:g}"
    for argument in arguments:
        key = argument.partition("=")[0]
        if preset is not None and key == "model.architecture":
            yield f"{argument} names a preset, which has its own optim.*. Write {preset} instead."
        if key in overruled and argument != preset:
            yield f"{argument} has no effect with {overruled[key]}. Leave it out."


def batches_of_evaluation(eval_every: int, max_steps: int) -> int:
    """The default of `train.eval_batches`: a tenth of the work of the steps between evaluations.

    A forward pass is a third of a step. The number follows from steps and not from a clock, so that
    the held-out loss of a run is the same on every machine.
    """
    return max(5, min(200, round(0.1 * min(eval_every, max_steps) * 3)))


def rate_of_recipe(optimizer: str, pretrained: str | None, lora_rank: int | None) -> float:
    """The default of `optim.learning_rate` for a model that is not ours; 0 if there is none.

    A larger rate undoes what pretrained weights have learned; adapters begin as random weights.
    """
    if optimizer != "adamw":
        return 0
    return 3e-4 if pretrained is None else 3e-5 if lora_rank is None else 2e-4


def name_of_data(source: str, mix: Sequence[DictConfig]) -> str:
    """The default of `run.name`: of each source the last part, of a URL without the query."""
    names = []
    for place in [part.source for part in mix] or [str(source)]:
        path = re.split("[?#]", place)[0] if "://" in place else place
        names.append(re.sub(r"[^\w.-]+", "-", Path(path).name).strip("-.") or "run")
    return "-".join(names)


ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver("data_name", name_of_data, replace=True)
OmegaConf.register_new_resolver("rate_of_recipe", rate_of_recipe, replace=True)
OmegaConf.register_new_resolver("eval_batches", batches_of_evaluation, replace=True)
