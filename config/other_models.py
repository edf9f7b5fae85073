"""Defaults for models that are not our own GPT: a recipe, and a learning rate by their size.

The learning rates of random weights are GPT-3's (Brown et al., 2020, table 2.1), and for smaller
models those of the presets of `model=`.
"""

from __future__ import annotations

from collections.abc import Callable

from config.schema import Config, ConfigError, ModelConfig, is_preset, other_model

RATES = {
    1_000_000: 3e-3,
    20_000_000: 1e-3,
    200_000_000: 6e-4,
    500_000_000: 3e-4,
    1_000_000_000: 2.5e-4,
    2_000_000_000: 2e-4,
    4_000_000_000: 1.6e-4,
    10_000_000_000: 1.2e-4,
}
"""By a number of parameters, AdamW's rate for random weights up to that size."""
LEAST = 1e-4
PRETRAINED = 0.1
"""The share of it for pretrained weights: a larger rate undoes what they have learned."""


def recipe_of(model: ModelConfig) -> str | None:
    """The file of config/recipe for this model; None for our own GPT and for presets."""
    other = other_model(model)
    return None if other is None or is_preset(model) else other[0].removeprefix("model.")


def rate_by_size(config: Config, parameters: int) -> float:
    """The learning rate for a model with this many parameters."""
    rate = next((rate for most, rate in RATES.items() if parameters <= most), LEAST)
    # Adapters start from random weights.
    starts_trained = config.model.pretrained is not None and config.model.lora_rank is None
    return float(f"{rate * PRETRAINED:.2g}") if starts_trained else rate


def settle_rate(config: Config, count: Callable[[], int]) -> None:
    """Replace an `optim.learning_rate` of 0 by the rate for the model's size.

    `count` returns the number of parameters without an untied output layer, because similar models
    may or may not tie it. Raises ConfigError for an optimizer without such rates, and for an
    `optim.min_learning_rate` that is larger.
    """
    optim = config.optim
    if other_model(config.model) is None or optim.learning_rate != 0:
        return
    if optim.name != "adamw":
        what = f"optim.name={optim.name} needs an explicit optim.learning_rate"
        raise ConfigError(f"{what}: the default rates by model size are for adamw.")
    optim.learning_rate = rate_by_size(config, count())
    if optim.min_learning_rate > optim.learning_rate:
        raise ConfigError(
            f"optim.min_learning_rate={optim.min_learning_rate:g} must be at most "
            f"optim.learning_rate, which is {optim.learning_rate:g} for a model of this size."
        )
