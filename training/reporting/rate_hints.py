"""Hints about the learning rate: where it may be wrong, and how a longer run continues."""

from __future__ import annotations

from config.schema import Config, OptimConfig
from snapshot.disk.state import RunState
from training.step import last_full_step, learning_rate_at, schedule_of

STEEP = 1.5
"""A rise of the learning rate by this factor is worth a hint."""
HIGH = 1e-3
"""Rates from here up suit random weights. Among pretrained models they suit only those..."""
SMALL = 20_000_000
"""...with at most so many parameters."""


def rate_too_high(config: Config, parameters: int) -> str | None:
    """A hint if the rate is so high that a pretrained model forgets what it has learned.

    The rates of the presets, and so the defaults, are for random weights. Adapters also begin with
    random weights.
    """
    model, optim = config.model, config.optim
    if model.pretrained is None or model.lora_rank is not None or parameters <= SMALL:
        return None
    if optim.learning_rate < HIGH:
        return None
    return (
        f"optim.name={optim.name} with optim.learning_rate={optim.learning_rate:g} suits random "
        f"weights, and undoes much of what {model.pretrained} has learned. Leave both out for "
        "AdamW with a learning rate that suits the model's size."
    )


def never_falls(config: Config) -> str | None:
    """A hint if the warm-up is as long as the run."""
    optim, steps = config.optim, config.train.max_steps
    if optim.warmup_steps < steps or steps == 1:
        return None
    last = learning_rate_at(steps, optim, steps)
    return (
        f"optim.warmup_steps={optim.warmup_steps} is as long as the run: the learning rate only "
        f"rises, to {last:.2g} of {optim.learning_rate:g} at the last step. "
        f"optim.warmup_steps={steps // 10} suits {steps:,} steps."
    )


def rate_jump(state: RunState, config: Config) -> str | None:
    """A hint if the next learning rate is much higher than the last one.

    The schedule spans all steps. With more steps, a finished run is back in the middle of the
    cosine, or in the stable phase.
    """
    try:
        before = OptimConfig(**state.config["optim"])
        steps_before = state.config["train"]["max_steps"]
        last = learning_rate_at(state.step, before, steps_before)
        stable = last_full_step(before, steps_before)
    except (KeyError, TypeError, ValueError, ArithmeticError):  # a snapshot of another version
        return None
    optim, steps = config.optim, config.train.max_steps
    rate = learning_rate_at(state.step + 1, optim, steps)
    if rate <= STEEP * last:
        return None
    why = f"the {optim.schedule} is over all {steps:,} steps."
    if schedule_of(optim).is_stable_first:
        why = f"it falls after step {last_full_step(optim, steps):,} of {steps:,}."
    if schedule_of(before).is_stable_first and schedule_of(optim).is_stable_first:
        why += f" Snapshots up to step {stable:,} continue at the stable rate."
    if last == 0:  # no run can be at that rate
        return f"the learning rate rises from 0 to {rate:.2g}: {why}"
    return (
        f"the learning rate rises from {last:.2g} to {rate:.2g}, {rate / last:.1f} times: {why} "
        f"optim.learning_rate={last:g} and "
        f"optim.min_learning_rate={min(last, optim.min_learning_rate):g} keep it."
    )


def twice_as_long(config: Config) -> str:
    """How a finished run continues, and at which rate: the text after 'Continue training: '."""
    optim, longer = config.optim, 2 * config.train.max_steps
    rate = learning_rate_at(config.train.max_steps + 1, optim, longer)
    if config.train.max_steps < optim.warmup_steps:
        return (
            f"the same command with train.max_steps={longer}. Its learning rate continues at "
            f"{rate:.2g}, in the\n{'':<19}warm-up of optim.warmup_steps={optim.warmup_steps}."
        )
    schedule = "schedule" if schedule_of(optim).is_stable_first else optim.schedule
    least = optim.min_learning_rate
    kept = f"; optim.learning_rate={least:g} as well keeps it at the last {least:g}" * (least > 0)
    return (
        f"the same command with train.max_steps={longer}. Its learning rate begins at {rate:.2g}, "
        f"in the\n{'':<19}middle of the longer {schedule}{kept}."
    )
