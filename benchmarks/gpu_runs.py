"""Whole runs of train.py on one device: the CUDA tests, exact resume, the cost of snapshots."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_contest import config_file, prepare
from gpu_items import Row, Settings
from harness import ROOT, kill_with_children, launch, median
from safetensors.torch import load_file
from snapshots import stall_and_durable

from snapshot.disk.folder import snapshots_in

LARGE_BATCH = 480
"""Sequences of GPT-2's global batch: half a million tokens."""
LONG = 16_384
"""Positions of a sequence that two GPUs share."""
ALONE = "--parallelism_config_dp_shard_size=1"
"""The launcher's option for no other processes than those that share something."""
FIRST_PORT = 29_800
PER_SNAPSHOT = 100
"""Steps to which a snapshot's stall is related."""


def pytest_rows(settings: Settings) -> list[Row]:
    """The project's tests that need a CUDA device; without one they are skipped."""
    report = Path(settings.folder, "tests.xml")
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += ["-p", "no:benchmark"]  # pytest-benchmark, where it is installed, warns of -n
    done = subprocess.run(
        [*command, "-n", "2", "-m", "gpu", f"--junitxml={report}", "tests/integration/gpu"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError((done.stdout + done.stderr)[-1500:])
    rows = []
    for case in ET.parse(report).iter("testcase"):
        problem = next((entry for entry in case if entry.tag in ("failure", "error")), None)
        result = "passed" if case.find("skipped") is None else "skipped"
        if problem is not None:
            result = f"failed: {(problem.text or '')[-600:]}"  # the message begins with a header
        rows.append({"check": case.get("name"), "result": result})
    return rows


@dataclass(frozen=True)
class Batches:
    """The steps of a run, in sequences, and how many of them are between two snapshots."""

    sequences: int
    micro: int
    every: int
    steps: int


@dataclass(frozen=True)
class Way:
    """How two devices compute."""

    name: str
    config: str
    """An accelerate config file."""
    micro: int
    """Sequences of a micro-batch."""
    options: tuple[str, ...]
    """Of the launcher."""


class Run:
    """train.py under `accelerate launch`, in the background.

    `on` are an accelerate config file and options of the launcher; one device without. `words` are
    further overrides.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        backend: str,
        batches: Batches,
        fresh: bool = True,
        on: Sequence[str] = (),
        words: Sequence[str] = (),
    ) -> None:
        self.folder = Path(settings.folder, "runs", name)
        if fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        steps = batches.steps
        more, words = words, [*settings.words(batches.sequences), *prepare(settings)]
        if any(word.startswith("model.architecture=") for word in more):  # it has sizes of its own
            words = [word for word in words if not word.startswith("model.")]
        words += [f"train.micro_batch_size={batches.micro}", f"train.max_steps={steps}"]
        words += [f"train.eval_every={steps}", "train.eval_batches=1", "train.sample_every=0"]
        words += [f"run.dir={self.folder}", f"snapshot.every={batches.every}", "snapshot.keep=2"]
        words += ["model.dropout=0.1", "optim.warmup_steps=2"]
        words += more
        config, *others = on or [config_file(settings)]
        options = [*others, "--mixed_precision=bf16", f"--dynamo_backend={backend}"]
        options += [] if backend == "no" else ["--dynamo_use_regional_compilation"]
        self.log = self.folder.with_suffix(".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                launch(config, "train.py", *words, options=options),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self) -> str:
        """Wait for the end; return what the run has printed. Raises RuntimeError if it failed."""
        code, printed = self.process.wait(), self.log.read_text()
        if code:
            raise RuntimeError(f"exit code {code}: {printed[-1500:]}")
        return printed

    def snapshots(self) -> list[Path]:
        return sorted(snapshots_in(self.folder).glob("step-????????"))

    def kill_at_first_snapshot(self) -> None:
        """kill -9 as soon as the first snapshot is on the disk. Raises RuntimeError if it fails."""
        while not self.snapshots():
            if self.process.poll() is not None:
                self.finish()
                raise RuntimeError("the run ended before it was killed")
            time.sleep(0.01)
        kill_with_children(self.process)
        if self.process.returncode == 0:
            raise RuntimeError("the run was over before it was killed")


def with_all(runs: dict[str, Run], work: Callable[[Run], object]) -> None:
    """Do the work with all runs at once; end them when it fails for one."""
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(work, runs.values()))
    finally:
        for run in runs.values():
            kill_with_children(run.process)


def resume_rows(settings: Settings) -> list[Row]:
    """Whether a run that is killed and resumed ends with the bits of one that is not.

    All runs share the device and compute at the same time: bits do not depend on the speed.
    """
    backends = {"not compiled": "no", "compiled by block": settings.backend}
    batches = Batches(4, 4, every=20, steps=40)

    def begin(kind: str, fresh: bool = True) -> dict[str, Run]:
        return {
            name: Run(settings, f"{kind}-{backend}", backend, batches, fresh)
            for name, backend in backends.items()
        }

    prepare(settings)
    killed, whole = begin("killed"), begin("whole")
    try:
        with_all(killed, Run.kill_at_first_snapshot)
        resumed = begin("killed", fresh=False)
        with_all(resumed, Run.finish)
    finally:
        with_all(whole, Run.finish)
    rows = []
    for name, run in whole.items():
        if "the newest of this run" not in resumed[name].log.read_text():
            raise RuntimeError(f"{name}: the run was not resumed")
        differing = different_tensors(run.snapshots()[-1], resumed[name].snapshots()[-1])
        result = "the same bits" if not differing else f"different: {', '.join(differing)[:200]}"
        rows.append({"check": f"a run killed at step 20 and resumed, {name}", "result": result})
    return rows


def different_tensors(one: Path, other: Path) -> list[str]:
    """Names of weights and optimizer tensors of two snapshots that differ in a bit."""
    files = sorted(path.name for path in one.glob("*.safetensors"))
    differing = ["the step"] if one.name != other.name else []
    for file in files:
        first, second = load_file(one / file), load_file(other / file)
        differing += [name for name in first if not first[name].equal(second[name])]
    return differing


def snapshot_rows(settings: Settings) -> list[Row]:
    """What a snapshot costs: its stall and the time until it is durable, related to 100 steps.

    A snapshot is written in the background of the next step, so a longer step hides more of it: the
    micro-batch as a step of its own, and a step of half a million tokens. Short steps have more
    between two snapshots, because one that is not durable yet makes the next one wait. The last is
    of another kind, as nothing is left to compute beside it: the median leaves it out.
    """
    micro, large = settings.shape["batch"], 8 if settings.rehearse else LARGE_BATCH
    every = 20 if settings.rehearse else PER_SNAPSHOT
    return [
        snapshot_row(settings, Batches(micro, micro, every, steps=4 * every + 10)),
        snapshot_row(settings, Batches(large, micro, every=3, steps=13)),
    ]


def snapshot_row(settings: Settings, batches: Batches) -> Row:
    run = Run(settings, f"snapshots-{batches.sequences}", settings.backend, batches)
    stall, durable = stall_and_durable(run.finish())
    records = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    speeds = [record["tokens_per_second"] for record in records if record["event"] == "train"]
    # Those after the first snapshot: the first steps compile.
    tokens = batches.sequences * settings.shape["block_size"]
    step = tokens / median(speeds[batches.every :])
    size = sum(path.stat().st_size for path in run.snapshots()[-1].iterdir())
    return {
        "tokens a step": tokens,
        "ms a step": round(1e3 * step, 1),
        "snapshot MB": round(size / 1e6),
        "stalls for s": stall,
        "durable after s": durable,
        "stall / 100 steps": stall / (PER_SNAPSHOT * step),
    }


def context_rows(settings: Settings) -> list[Row]:
    """The speed of two devices that share each sequence, and of two with sequences of their own.

    Both shard the weights, and take the same sequences a step.
    """
    length = settings.shape["block_size"] if settings.rehearse else LONG
    words = (f"data.block_size={length}", "model.dropout=0", "model.activation_checkpointing=true")
    cp = _pair(settings, "share each sequence", "cp", 1, ALONE)
    return _speeds(settings, "context parallelism", 2, length, words, cp)


def matrix_rows(settings: Settings) -> list[Row]:
    """The speed of two devices that share each matrix of GPT-2, and of two that shard it."""
    batch, length = settings.shape["batch"], settings.shape["block_size"]
    tp = _pair(settings, "share each matrix", "tp", batch, ALONE)
    return _speeds(settings, "tensor parallelism", batch, length, ("model.dropout=0",), tp)


def _pair(settings: Settings, name: str, kind: str, micro: int, *options: str) -> Way:
    """How two devices share something, by a shipped accelerate config file."""
    return Way(name, f"{kind}{'_cpu' if settings.rehearse else ''}.yaml", micro, options)


def _speeds(
    settings: Settings, topic: str, sequences: int, length: int, words: Sequence[str], shared: Way
) -> list[Row]:
    """Tokens a second of two devices that share something, then of two under FSDP.

    They run one after the other, with the same sequences a step. Both need two devices.
    """
    if not settings.rehearse and torch.cuda.device_count() < 2:
        return [{"two GPUs": f"skipped: {topic} needs two GPUs, and here is one"}]
    own = _pair(settings, "have sequences of their own", "fsdp", max(1, sequences // 2))
    steps = 6 if settings.rehearse else 30
    rows = []
    for way in (shared, own):
        batches = Batches(sequences, way.micro, every=steps, steps=steps)
        # The port of the other run may still be taken.
        port = f"--main_process_port={FIRST_PORT + len(rows)}"
        options = (way.config, *way.options, "--num_processes=2", port)
        name = f"{topic.replace(' ', '-')}-{way.config}"
        run = Run(settings, name, "no", batches, on=options, words=words)
        if "2 processes" not in run.finish():
            raise RuntimeError(f"{way.name}: two processes were to compute")
        records = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
        speeds = [record["tokens_per_second"] for record in records if record["event"] == "train"]
        speed = round(median(speeds[steps // 3 :]))
        rows.append({"two GPUs": way.name, "positions": length, "tokens/s": speed})
    return rows
