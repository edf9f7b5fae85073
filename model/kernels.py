"""Kernels of attention on CUDA devices, by the names of `run.attention`.

Only that key chooses one, for our models and those of transformers: a config.json never does. They
are reached through torch's own attention, so FlashAttention 3 and 4 alone need a package.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

SIXTEEN_BITS = ("bf16", "fp16")
"""Precisions, by accelerate's names."""
HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class Kernel:
    """What a kernel can compute."""

    majors: tuple[int, ...]
    """Major numbers of the compute capabilities that it supports."""
    largest_head: int = 256
    """Channels; a multiple of `HEAD_MULTIPLE`."""
    implementation: str | None = None
    """The name by which torch activates a FlashAttention that is not its own."""
    package: str = "torch"
    """The package that has it."""

    def why_not(
        self,
        precision: str,
        dropout: float,
        head_size: int | None = None,
        device: torch.device | None = None,
    ) -> str | None:
        """Why a run, its device or heads of so many channels cannot use it: a sentence's end."""
        if device is not None and find_spec(self.package) is None:
            return f"needs the package {self.package}, which is not installed"
        if device is not None and torch.cuda.get_device_capability(device)[0] not in self.majors:
            name, has = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
            majors = " or ".join(f"{major}.x" for major in self.majors)
            return (
                f"needs compute capability {majors}, and {name} has {has[0]}.{has[1]}. Use kernel"
            )
        if precision not in SIXTEEN_BITS:
            return (
                f"computes in 16 bits, and the run in {precision.replace('no', 'float32')}. Set "
                "mixed_precision: bf16 in the accelerate config file"
            )
        if dropout:
            return f"has no dropout, and model.dropout={dropout}. Set that to 0, or use kernel"
        if head_size and (head_size % HEAD_MULTIPLE or head_size > self.largest_head):
            return (
                f"takes heads of {HEAD_MULTIPLE} to {self.largest_head} channels in multiples of "
                f"{HEAD_MULTIPLE}, and the model's have {head_size}. Use kernel"
            )
        return None

    def activate(self) -> None:
        """Have torch's attention use it from now on."""
        if self.implementation is not None:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl(self.implementation)


KERNEL = "kernel"
"""torch's own choice."""
VARLEN, FLASH3, FLASH4 = "varlen", "flash3", "flash4"
KERNELS = {
    VARLEN: Kernel((8, 9, 10, 11, 12)),  # torch's own
    FLASH3: Kernel((9,), implementation="FA3", package="flash_attn_interface"),
    FLASH4: Kernel((9, 10), largest_head=128, implementation="FA4", package="flash_attn"),
}
"""They take documents in a row without a mask, and have no dropout."""
