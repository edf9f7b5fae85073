"""The device that a command computes on."""

from __future__ import annotations

import torch

from model.causal_lm import LanguageModel
from model.cpu.threads import limit_threads
from model.cpu.tune import tune


class DeviceError(ValueError):
    """A device that cannot be used, or that has too little memory. The message is a sentence."""


def default_device() -> str:
    """The name of the first GPU, or of the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(name: str) -> torch.device:
    """The device of this name, where a CPU computes with no more threads than it has cores.

    Raises DeviceError if it cannot hold a tensor.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"--device {name} cannot be used here: {reason}") from error
    if device.type == "cpu":
        limit_threads()
    return device


def place(model: LanguageModel, device: torch.device) -> LanguageModel:
    """Move a model to a device; on a CPU its layers become those of `model.cpu`."""
    if device.type == "cpu":
        tune(model)
    return model.to(device)
