"""The kernels of attention on CUDA devices, by the names of `run.attention`.

Only that key chooses one, for our models and those of transformers: a config.json never does. All
are reached through torch's own attention, so a package is needed for FlashAttention 3 and 4 alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

SIXTEEN_BITS = ("bf16", "fp16")
"""Precisions, by accelerate's names."""
HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class Kernel:
    """What a kernel is, and what it can compute."""

    title: str
    majors: tuple[int, ...]
    """Major numbers of the compute capabilities that it supports."""
    largest_head: int = 256
    """Channels; a multiple of `HEAD_MULTIPLE`."""
    implementation: str | None = None
    """The name by which torch activates a FlashAttention that is not its own."""
    package: str | None = None
    """The module that has it."""
    takes_documents: bool = True
    """Whether it computes documents of a row without a mask. It then has no dropout."""
    is_exact: bool = True
    """Whether it adds up in one order, so that a resumed run has the same bits."""

    def why_not(self, precision: str, dropout: float) -> str | None:
        """Why a run cannot use it, whatever the device: the end of a sentence."""
        if precision not in SIXTEEN_BITS:
            return (
                f"computes in 16 bits, and the run in {precision.replace('no', 'float32')}. Set "
                "mixed_precision: bf16 in the accelerate config file"
            )
        if dropout and self.takes_documents:
            return f"has no dropout, and model.dropout={dropout}. Set that to 0, or use kernel"
        return None

    def why_not_here(self, device: torch.device) -> str | None:
        """Why this machine cannot use it."""
        if device.type != "cuda":
            return f"runs on CUDA devices, and this run computes on {device}. Leave it out"
        if self.package is not None and find_spec(self.package.partition(".")[0]) is None:
            return f"needs the package {self.package.partition('.')[0]}, which is not installed"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in self.majors:
            name = torch.cuda.get_device_name(device)
            known = " or ".join(f"{one}.x" for one in self.majors)
            return f"needs compute capability {known}, and {name} has {major}.{minor}. Use kernel"
        return None

    def why_not_for(self, head_size: int) -> str | None:
        """Why it cannot compute heads of so many channels."""
        if head_size % HEAD_MULTIPLE == 0 and head_size <= self.largest_head:
            return None
        return (
            f"takes heads of {HEAD_MULTIPLE} to {self.largest_head} channels in multiples of "
            f"{HEAD_MULTIPLE}, and the model's have {head_size}. Use kernel"
        )

    def active(self) -> AbstractContextManager[Any]:
        """A context in which torch's attention uses it."""
        from torch.nn import attention

        if self.implementation is not None:
            attention.activate_flash_attention_impl(self.implementation)
        if self.takes_documents:
            return nullcontext()
        backends = attention.SDPBackend
        order = [
            *(backends.CUDNN_ATTENTION, backends.FLASH_ATTENTION),
            *(backends.EFFICIENT_ATTENTION, backends.MATH),
        ]
        return attention.sdpa_kernel(order, set_priority=True)


VARLEN, CUDNN, FLASH3, FLASH4 = "varlen", "cudnn", "flash3", "flash4"
KERNELS = {
    VARLEN: Kernel("torch's variable-length kernel", (8, 9, 10, 11, 12)),
    CUDNN: Kernel("cuDNN", (8, 9, 10, 11, 12), takes_documents=False, is_exact=False),
    FLASH3: Kernel("FlashAttention 3", (9,), implementation="FA3", package="flash_attn_interface"),
    FLASH4: Kernel(
        "FlashAttention 4",
        (9, 10),
        largest_head=128,
        implementation="FA4",
        package="flash_attn.cute.interface",
    ),
}
