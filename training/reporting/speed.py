"""How much of the machine a run uses: the FLOP of its model, as a share of the peak (MFU).

The model FLOP utilisation of Chowdhery et al. (2022, appendix B) counts what the model needs, not
what is computed: a recomputed block counts once.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from statistics import median

import torch
from accelerate import Accelerator
from torch import nn

from config.schema import Config
from model.causal_lm import LanguageModel
from model.gpt import GPTConfig

PEAKS = (
    (r"\bB200\b", 2250e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\b(H100|H200|GH200)\b", 989e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA10G\b", 70e12),
    (r"\bRTX 4090\b", 165e12),
    (r"\bRTX 3090\b", 71e12),
    (r"\bV100\b", 125e12),
    (r"\bT4\b", 65e12),
)
"""By the name of a GPU, FLOP/s of 16-bit tensor cores with float32 sums and without sparsity, as
NVIDIA publishes them. V100 and T4 have them in fp16 alone."""
ONLY_FP16 = r"\b(V100|T4)\b"
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MATRIX, LARGER_MATRIX = 2048, 8192
"""Rows and columns of the matrices whose product is the measured peak; the larger on CUDA, where
starting a product takes time as well."""
PRODUCTS = 5
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Entries of a config.json of a mixture, in which a token uses a part of the parameters."""


@dataclass(frozen=True)
class Speed:
    """What a token costs, and what the machine could compute."""

    flops_per_token: float | None
    """None for a mixture of experts."""
    peak: float | None
    """FLOP/s of all processes; None if it is unknown."""
    source: str = ""
    """Where the peak is from."""

    def share(self, tokens_per_second: float) -> float | None:
        """The share of the peak that a speed is; None if it is unknown."""
        if self.flops_per_token is None or self.peak is None:
            return None
        return tokens_per_second * self.flops_per_token / self.peak

    def as_words(self) -> str:
        """For the header."""
        cost = "unknown FLOP"
        if self.flops_per_token is not None:
            cost = f"{_short(self.flops_per_token)}FLOP"
        if self.peak is None:
            return f"{cost} a token"
        return f"{cost} a token; peak of the machine {_short(self.peak)}FLOP/s, {self.source}"


def speed_of(model: LanguageModel, config: Config, accelerator: Accelerator) -> Speed:
    """The cost of a token of this model, and the peak of all processes.

    A measured peak is that of each process while the others measure theirs.
    """
    device, precision = accelerator.device, accelerator.mixed_precision
    flops, peak = flops_per_token(model, config.data.block_size), None
    source = "as published"
    if device.type == "cuda":
        peak = published_peak(torch.cuda.get_device_name(device), precision)
    if config.run.measure_peak:
        peak, source = measured_peak(device, precision), "a measured matrix product"
    return Speed(flops, None if peak is None else peak * accelerator.num_processes, source)


def flops_per_token(model: LanguageModel, block_size: int) -> float | None:
    """FLOP of a forward and a backward pass for a token: 6N + 12LTC; None for a mixture.

    N excludes embeddings that are looked up and not multiplied. A frozen parameter has 4 instead of
    6: no gradient is computed for it. Attention is counted as if every position saw all others.
    """
    config = model.config
    if not isinstance(config, GPTConfig) and any(config.content.get(key) for key in EXPERTS):
        return None
    output = model.get_output_embeddings().weight
    looked_up = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not output
    }
    matrices = 0
    for parameter in model.parameters():
        if id(parameter) not in looked_up:
            matrices += parameter.numel() * (6 if parameter.requires_grad else 4)
    width = config.n_embd if isinstance(config, GPTConfig) else config.n_head * config.head_size
    return matrices + 12 * config.n_layer * width * block_size


def published_peak(name: str, precision: str) -> float | None:
    """FLOP/s of a GPU by its name; None if it is not known for this precision."""
    if precision == "no" or (precision == "bf16" and re.search(ONLY_FP16, name)):
        return None
    return next((peak for pattern, peak in PEAKS if re.search(pattern, name)), None)


def measured_peak(device: torch.device, precision: str) -> float:
    """FLOP/s of a square matrix product in this precision, on this process's threads.

    The numbers are random: a GPU needs less power for equal ones, and computes faster.
    """
    size = LARGER_MATRIX if device.type == "cuda" else MATRIX
    generator = torch.Generator(device).manual_seed(0)
    first, second = (
        torch.randn(size, size, device=device, generator=generator).to(DTYPES[precision])
        for _ in range(2)
    )
    out = torch.empty_like(first)
    seconds = []
    for _ in range(PRODUCTS):
        begun = time.perf_counter()
        torch.mm(first, second, out=out)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / median(seconds)


def _short(number: float) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g} "
