"""One run, any shape: the first steps on this launch, split otherwise, and in one process."""

from __future__ import annotations

from collections.abc import Iterator

from proving.lines import Line, largest_difference, passed, within
from proving.task import Outcome

LOSS, NORM, GRADIENT = 1e-5, 1e-4, 1e-3
"""Bounds of relative differences in float32: sums in another order differ by less."""
SMALLEST = 1e-6
"""Gradients below this share of the largest one are all rounding."""
ROUNDING = {"bf16": 2e-2, "fp16": 5e-3, "fp8": 5e-2}
"""How far 16 and 8 bits may take the loss of the first steps from that of float32."""


def same_steps(name: str, here: Outcome, other: Outcome, words: str) -> Iterator[Line]:
    """Losses, norms, gradients and rows of the first steps of two attempts in float32."""
    losses = largest_difference(here.losses, other.losses)
    norms = largest_difference(here.norms, other.norms)
    steps = len(here.losses.keys() & other.losses.keys())
    yield within(f"loss, {name}", losses, LOSS, f"{steps} steps in float32 against {words}")
    yield within(f"gradient norm, {name}", norms, NORM, "of the same steps, before clipping")
    yield same_gradients(name, here, other)
    yield same_rows(name, here, other)


def same_gradients(name: str, here: Outcome, other: Outcome) -> Line:
    """The gradients of the first step, by parameter."""
    one, two = (found.facts.get("gradients", {}) for found in (here, other))
    if not one or one.keys() != two.keys():
        return passed(f"gradients, {name}", False, "they are not of the same parameters")
    least = SMALLEST * max(one.values(), default=0.0)
    differences = {
        parameter: abs(norm - two[parameter]) / max(norm, least, 1e-30)
        for parameter, norm in one.items()
    }
    worst = max(differences, key=lambda parameter: differences[parameter])
    said = f"{len(one)} parameters, the largest difference of {worst}"
    return within(f"gradients, {name}", differences[worst], GRADIENT, said)


def same_rows(name: str, here: Outcome, other: Outcome) -> Line:
    """The rows of each step: the same, whoever reads them."""
    one, two = here.facts.get("rows", {}), other.facts.get("rows", {})
    steps = one.keys() & two.keys()
    holds = bool(steps) and all(one[step] == two[step] for step in steps)
    count = sum(len(one[step]) for step in steps)
    said = f"{count} rows of {len(steps)} steps, the same and as often"
    return passed(f"rows, {name}", holds, said)


def weights(here: Outcome) -> Iterator[Line]:
    """The weights after the last step: each has changed, copies and tied ones are equal."""
    unmoved = here.facts["unmoved"]
    said = f"no update has changed {unmoved[0]}" if unmoved else "the updates have changed each"
    yield passed("trained parameters", not unmoved, said)
    difference = here.facts["replicas"]
    if difference is not None:
        yield within("copies of the weights", difference, 0.0, "equal on all processes")
    tied = here.facts["tied"]
    if tied is not None:
        said = "the embedding and the output layer have the same numbers after the updates"
        yield passed("tied weights", tied, said)


def rounding(precision: str, here: Outcome, in_float32: Outcome) -> Line:
    """The run's own precision against float32."""
    difference = largest_difference(in_float32.losses, here.losses)
    bound = ROUNDING.get(precision, 0.0)
    return within(f"{precision} against float32", difference, bound, "loss of the first steps")
