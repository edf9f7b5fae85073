"""What the person in front of a run sees, on the main process; the others are silent."""

from __future__ import annotations

import os
import platform
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil
import torch
from accelerate import Accelerator
from tqdm import tqdm

from training.distributed.environment import cores, processes_here
from training.distributed.launch import effective_precision, offloads
from training.reporting.output import shown

BAR = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]"


@dataclass
class Console:
    """Lines on stdout; progress as a live bar where stderr is a terminal, and as lines in a log."""

    shown: bool
    """Whether this process speaks."""
    max_steps: int
    step: int
    """Where the run goes on from."""

    def __post_init__(self) -> None:
        self.bar: tqdm | None = None
        if self.shown and sys.stderr.isatty() and not _is_pipe(sys.stdout):
            self.bar = tqdm(
                total=self.max_steps, initial=self.step, bar_format=BAR, dynamic_ncols=True
            )

    def say(self, text: str = "") -> None:
        """Print a line, above the bar where there is one."""
        if not self.shown:
            return
        if self.bar is not None:
            self.bar.write(shown(text))
        else:
            print(shown(text), flush=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.say(f"warning: {text}")

    def sample(self, step: int, text: str) -> None:
        """Print a text of the model's, set off from the rest."""
        self.say(f"----- sample at step {step} -----\n{text.strip()}\n-----")

    def advance(self, step: int) -> None:
        """A step is done, whose figures are not known yet."""
        self.step = step
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def progress(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        seconds_left: float,
        skipped: int = 0,
        behind: str = "",
    ) -> None:
        """The figures of a step: `skipped` updates were left out so far, the Hub is `behind`."""
        figures = f"loss {loss:.4f}, {_short(tokens_per_second)} tokens/s"
        if skipped:
            figures += f", {skipped} skipped"
        if behind:
            figures += f", {behind}"
        if self.bar is not None:
            self.bar.set_postfix_str(shown(figures), refresh=False)
            self.bar.update(step - self.bar.n)
        if self.bar is None or not sys.stdout.isatty():
            self.say(f"step {step}/{self.max_steps}, {figures}, {_duration(seconds_left)} left")

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _is_pipe(stream: TextIO) -> bool:
    """Whether somebody reads it who may print it on the same terminal, as `| tee log` does."""
    return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)


def machine_line(accelerator: Accelerator) -> str:
    """Processes, device, precision and threads, for the header."""
    count = accelerator.num_processes
    precision = {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    parts = [counted(count, "process"), precision]
    if accelerator.device.type == "cpu":
        threads = torch.get_num_threads()
        parts.insert(1, f"CPU with {counted(threads, 'thread')}{' each' if count > 1 else ''}")
    else:
        parts.insert(1, _device_name(accelerator.device))
    if count > 1:
        parts.append(_strategy(accelerator))
    backend = accelerator.state.dynamo_plugin.backend.value.lower()
    if backend != "no":
        whole = not accelerator.state.dynamo_plugin.use_regional_compilation
        parts.append(f"compiled {'whole' if whole else 'by block'} with {backend}")
    return ", ".join(parts)


def computed_on(accelerator: Accelerator) -> str:
    """All that the last bits of a step depend on: with the same, a resume repeats them exactly."""
    processor = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{machine_line(accelerator)}; {processor}; torch {torch.__version__}"


def _processor() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in facts if "model name" in line)
    except (OSError, StopIteration):  # not Linux, or not x86
        return platform.processor() or platform.machine()


def _strategy(accelerator: Accelerator) -> str:
    """'DDP', 'FSDP', or what of it is special, as the accelerate config file has it."""
    if not accelerator.is_fsdp2:
        return "DDP"
    plugin, sizes = accelerator.state.fsdp_plugin, accelerator.parallelism_config
    name = "FSDP"
    if sizes is not None and sizes.dp_replicate_size > 1:
        name += f" ({counted(sizes.dp_replicate_size, 'replica')} of {sizes.dp_shard_size} shards)"
    if not plugin.reshard_after_forward:
        name += ", gathered until the backward pass"
    if offloads(accelerator):
        name += ", weights and optimizer on the CPU"
    return name


def machine_hints(accelerator: Accelerator) -> list[str]:
    """What would make this machine faster, where it is plain to see."""
    hints = []
    device, used = accelerator.device, torch.get_num_threads()
    share = cores() // processes_here()
    usable = min(cores(), psutil.cpu_count(logical=False) or cores())  # not two threads of a core
    if device.type == "cpu" and accelerator.num_processes == 1 and used < usable:
        hints.append(
            f"{used} of {usable} cores used. accelerate launch --config_file accelerate_configs/"
            f"cpu.yaml --num_cpu_threads_per_process {usable} uses all of them."
        )
    if device.type != "cpu" and offloads(accelerator) and used < share:
        hints.append(
            f"the optimizer is on the CPU, where each process uses {counted(used, 'thread')}. "
            f"accelerate launch --num_cpu_threads_per_process {share} gives each its share of "
            f"the {cores()} cores."
        )
    if (
        device.type == "cuda"
        and accelerator.mixed_precision == "bf16"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        hints.append(
            f"bf16 is asked for, but {_device_name(device)} has no bf16 instructions, and no "
            "fused attention in it. The accelerate config file can say mixed_precision: "
            f"{'no' if offloads(accelerator) else 'fp16'}."
        )
    if effective_precision() is not None:
        hints.append(
            "bf16 is asked for, but this CPU has no bf16 instructions: float32, which is several "
            "times as fast here. EMULATE_BF16=1 in the environment computes in bf16 all the same."
        )
    return hints


def counted(number: int, noun: str) -> str:
    """'1 process', '2 processes', '2 threads'."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
