"""What a model that is not our own GPT begins from: a recipe of its own, and a rate by its size.

The learning rates of random weights are GPT-3's (Brown et al., 2020, table 2.1), and for smaller
models those of the presets of `model=`. Pretrained weights take a tenth: a larger rate undoes what
they have learned. Adapters begin with random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from config.schema import OTHER_MODELS, Config, ConfigError, other_model

RATES = (
    (1_000_000, 3e-3),
    (20_000_000, 1e-3),
    (200_000_000, 6e-4),
    (500_000_000, 3e-4),
    (1_000_000_000, 2.5e-4),
    (2_000_000_000, 2e-4),
    (4_000_000_000, 1.6e-4),
    (10_000_000_000, 1.2e-4),
)
"""Up to so many parameters, the rate of random weights."""
LEAST = 1e-4
PRETRAINED = 0.1


def recipe_of(arguments: Sequence[str]) -> list[str]:
    """The argument that chooses a file of config/recipe, if these name a model that is not ours."""
    given = dict(argument.split("=", 1) for argument in arguments)
    named = [name for name in OTHER_MODELS if given.get(f"model.{name}", "null") != "null"]
    return [f"recipe={name}" for name in named[:1]]


def rate_by_size(config: Config, parameters: int) -> float:
    """The learning rate for a model with so many parameters."""
    rate = next((rate for most, rate in RATES if parameters <= most), LEAST)
    starts_trained = config.model.pretrained is not None and config.model.lora_rank is None
    return float(f"{rate * PRETRAINED:.2g}") if starts_trained else rate


def settle_rate(config: Config, count: Callable[[], int]) -> None:
    """Put a number in the place of an `optim.learning_rate` that the size decides.

    `count` returns the number of the model's parameters. Raises ConfigError for an
    `optim.min_learning_rate` that is larger.
    """
    optim = config.optim
    if other_model(config.model) is None or optim.learning_rate != 0:
        return
    optim.learning_rate = rate_by_size(config, count())
    if optim.min_learning_rate > optim.learning_rate:
        raise ConfigError(
            f"optim.min_learning_rate={optim.min_learning_rate:g} must be at most "
            f"optim.learning_rate, which is {optim.learning_rate:g} for a model of this size."
        )
