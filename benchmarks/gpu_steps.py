"""Updates of train.py in this process, without its text and snapshots: their speed and memory.

The only file of benchmarks/gpu.py that calls torch.cuda.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
)
from harness import median, spread

from config.compose import load_config
from config.schema import OptimConfig, RunConfig, gpt_config
from model.families import build_model
from model.fp8 import FP8, use_fp8
from model.frozen import AUTO, keep_frozen
from model.gpt import GPT, GPTConfig
from model.lora import Lora
from planning.allocation_log import LiveBytes
from planning.estimate import peak_bytes
from planning.fake_trace import Shape
from training.distributed.accelerator import (
    configure_wrapping,
    is_compiled,
)
from training.memory import is_out_of_memory
from training.reporting.speed import published_peak
from training.step import compute_reproducibly, make_optimizer

STORED_AS = "bf16"
"""What the base of adapters would have in its files."""
WARM_UP = 3
"""The first update compiles and creates the optimizer's state."""
TURNS = 5
ONE_WORKER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "ACCELERATE_USE_FSDP": "true"}
"""What a launcher sets for the only process of FSDP; train.py refuses such a launch."""


@dataclass(frozen=True)
class Case:
    """A model and how it is trained. `words` are overrides of train.py, with the batch."""

    words: tuple[str, ...]
    vocabulary: int
    precision: str = "bf16"
    backend: str = "no"
    """The compiler of each block, or "no"."""
    fsdp: bool = False
    offload: bool = False
    """FSDP's weights, gradients and optimizer state are in the machine's memory."""
    documents: bool = False
    """Rows hold documents of a tenth of the context, which do not see each other."""
    tf32: bool = False
    """Products of float32 numbers use TF32."""
    optimizer: str = "adamw"
    """As in `optim.name`."""
    frozen: str | None = None
    """How weights around adapters are kept, one of `model.frozen.KINDS`; None trains the model."""

    def model(self) -> GPTConfig:
        config = gpt_config(load_config(list(self.words)), self.vocabulary)
        return config if self.frozen is None else replace(config, lora=Lora(rank=16, alpha=32))

    @property
    def rest(self) -> str:
        """The precision of what fp8 leaves out, or of all."""
        return self.precision.replace(FP8, "bf16")

    def batch(self) -> int:
        return int(load_config(list(self.words)).train.global_batch_size)


def the_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Free what earlier cases have left, so that a case's peak is its own."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # they count as allocated
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def counted_memory(compiled: bool) -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the peak bytes of tensors.

    On a CPU the allocation log counts, which sees nothing of compiled code: None.
    """
    if torch.cuda.is_available():
        yield torch.cuda.max_memory_allocated
    elif compiled:
        yield lambda: None
    else:
        with LiveBytes() as tracker:
            yield lambda: int(tracker.totals().sum(axis=1).max())


def peak_flops(precision: str) -> float | None:
    """FLOP/s of this GPU as published; None on a CPU and for an unknown GPU."""
    if not torch.cuda.is_available():
        return None
    return published_peak(torch.cuda.get_device_name(), precision)


class Training:
    """The model, optimizer and update of train.py, on one batch of random tokens."""

    def __init__(self, case: Case) -> None:
        device, config, batch = the_device(), case.model(), case.batch()
        self.accelerator = Accelerator(**_options(case))
        compute_reproducibly(is_compiled(self.accelerator))
        torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
        with torch.device("cpu" if case.offload else device):
            model = build_model(config)
        if case.frozen is not None:
            keep_frozen(model, case.frozen, STORED_AS)
        self.flops_per_token = model.flops_per_token(config.block_size)
        if case.precision == FP8:
            use_fp8(model, emulated=device.type == "cpu")
        self.tokens = batch * config.block_size
        configure_wrapping(self.accelerator, model, RunConfig())
        optimizer = make_optimizer(
            model,
            OptimConfig(name=case.optimizer),
            torch.device("cpu") if case.offload else device,
            case.precision,
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        # As uneven as text: deterministic kernels add up the gradients of a frequent token in turn.
        drawn = torch.rand((batch, config.block_size + 1), device=device) ** 4
        windows = (drawn * case.vocabulary).long()
        self.batch = windows[:, :-1], windows[:, 1:].contiguous()
        if case.documents:
            length = max(1, config.block_size // 10)
            positions = torch.arange(config.block_size, device=device) % length
            self.batch = (*self.batch, positions.repeat(batch, 1))

    def step(self) -> None:
        """One update; the device may still be computing it."""
        self.accelerator.backward(self.model(*self.batch))
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, steps: int) -> float:
        """Seconds an update, on average over `steps` of them."""
        wait_for_device()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait_for_device()
        return (time.perf_counter() - begun) / steps

    def speed(self, seconds: list[float], precision: str) -> dict[str, Any]:
        """The columns of a table for the seconds an update."""
        per_second = self.tokens / median(seconds)
        peak = peak_flops(precision)
        assert self.flops_per_token is not None
        return {
            "ms a step": spread([1e3 * value for value in seconds], 1),
            "tokens/s": round(per_second),
            "MFU": None if peak is None else per_second * self.flops_per_token / peak,
        }


@contextmanager
def training_of(case: Case) -> Iterator[Training]:
    """A case's training, in an environment and with a process group of its own."""
    before = dict(os.environ)
    free_memory()
    try:
        if case.fsdp:
            offload = str(case.offload).lower()  # has accelerate add gloo for tensors of the CPU
            os.environ.update(ONE_WORKER, FSDP_OFFLOAD_PARAMS=offload)
            cpu = not torch.cuda.is_available()
            state = PartialState(cpu=cpu, store=dist.HashStore(), rank=0, world_size=1)
            state.distributed_type = DistributedType.MULTI_GPU  # which accelerate promotes to FSDP
        yield Training(case)
    finally:
        os.environ.clear()
        os.environ.update(before)
        if dist.is_initialized():
            dist.destroy_process_group()
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)


def _options(case: Case) -> dict[str, Any]:
    """The arguments of the Accelerator."""
    by_block = case.backend != "no"
    options: dict[str, Any] = {
        "cpu": not torch.cuda.is_available(),
        "mixed_precision": case.rest,
        "dynamo_plugin": TorchDynamoPlugin(case.backend, use_regional_compilation=by_block),
    }
    if case.fsdp:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=list(GPT._no_split_modules),
            cpu_ram_efficient_loading=False,
            cpu_offload=case.offload,
        )
    return options


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Speed and peak memory in about `seconds`, with plan.py's prediction where it makes one.

    A model that does not fit is a result.
    """
    compiled = case.backend != "no"
    config = case.model()
    row: dict[str, Any] = {
        "model": f"{config.n_layer} layers, {config.n_embd} wide",
        "micro-batch": case.batch(),
        "precision": "TF32" if case.tf32 else case.precision,
        "compiled": "by block" if compiled else "no",
        "checkpointing": "yes" if config.activation_checkpointing else "no",
    }
    if case.documents:
        row["attention"] = "documents by a mask"
    if case.fsdp:
        row["FSDP"] = "offloaded" if case.offload else "one rank"
        row["threads"] = torch.get_num_threads()  # of AdamW, where it is offloaded
    if case.optimizer != "adamw":
        row["optimizer"] = case.optimizer
    if case.frozen is not None:
        row["frozen"] = case.frozen
    measured = None
    try:
        with counted_memory(compiled) as peak, training_of(case) as training:
            training.seconds(WARM_UP)
            if torch.cuda.is_available():  # compiling may have taken more
                torch.cuda.reset_peak_memory_stats()
            steps = max(1, round(seconds / TURNS / training.seconds(1)))
            turns = [training.seconds(steps) for _ in range(TURNS)]
            row |= training.speed(turns, case.precision)
            measured = peak()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        row["tokens/s"] = "does not fit"
    row["peak MB"] = None if measured is None else round(measured / 1e6)
    if not case.fsdp and case.precision != FP8:  # plan.py has neither here
        planned = planned_bytes(case)
        row["plan MB"] = round(planned / 1e6)
        if measured is not None and not compiled:  # the plan is of what is not compiled
            row["plan / peak"] = planned / measured
    return row


def planned_bytes(case: Case) -> float:
    """What plan.py predicts for the tensors of an update."""
    shape = Shape(
        the_device().type,
        case.rest,
        packed=case.documents,
        frozen_dtype=case.frozen or AUTO,
        stored_as=STORED_AS,
        optimizer=case.optimizer,
    )
    return peak_bytes(case.model(), shape, case.batch(), False)


def deterministic(case: Case, seconds: float) -> list[dict[str, Any]]:
    """The price of deterministic kernels: turns with and without, in one process."""
    compiled = "no" if case.backend == "no" else "by block"
    found: dict[bool, list[float]] = {True: [], False: []}
    with training_of(case) as training:
        try:
            for kind in (False, True):
                torch.use_deterministic_algorithms(kind)
                training.seconds(WARM_UP)
            steps = max(1, round(seconds / TURNS / 2 / training.seconds(1)))
            for turn in range(TURNS):
                for kind in (True, False) if turn % 2 else (False, True):
                    torch.use_deterministic_algorithms(kind)
                    found[kind].append(training.seconds(steps))
        finally:
            torch.use_deterministic_algorithms(False)
        ratios = [one / other for one, other in zip(found[True], found[False], strict=True)]
        rows = []
        for kind, values in found.items():
            row = {"deterministic": "yes" if kind else "no", "compiled": compiled}
            price = {"times the other": spread(ratios)} if kind else {}
            rows.append({**row, **training.speed(values, case.precision), **price})
    return rows
