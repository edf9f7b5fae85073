"""How much of the machines' time ends up in the model, where they are interrupted at random times.

    python benchmarks/goodput.py [--trainers ours auto trainer bare light torchft] [--machines 2]
        [--mean 30 120] [--notice 0.5] [--empty 0.5] [--steps 960] [--seconds 0.5] [--every 20]
        [--seed 1] [--torchft FOLDER]

Each trainer runs the same steps of a small model: first undisturbed and as fast as it can, then
paced, while machines go after exponential times: some with a notice (SIGTERM, 8 s before), the
others by kill -9; most come back, some of those with an empty disk (goodput_schedule.py). A machine
is a network namespace with a folder for its disk. A step takes `--seconds` on one machine, half as
long on two, whatever the processor does.

One machine starts the process itself, several the command of docs/several-machines.md (torch
elastic by accelerate; no trainer compiles), and again half a second after it has ended. `ours` is
train.py with ddp_elastic.yaml and hub.repo_id, `trainer` is transformers' Trainer with
hub_strategy=checkpoint and enable_jit_checkpoint, both with a loopback Hub of 200 ms a request and
20 MB/s. `auto` is `ours` as for machines that are interrupted: it does not save every `--every`
steps, but with snapshot.every=auto, and is told how often machines go without a notice
(run.interruptions_per_day) and how long before the end a notice comes (run.notice_seconds). `bare`
is a loop with accelerate's save_state on a disk that all machines share and none loses. Its model
is transformers' GPT-2, whose import takes longer than torch's; that of `light`, the same loop,
needs only torch. `torchft` (`pip install --target FOLDER torchft`) has its own membership and
writes to the machine's disk.

Goodput is the time of the steps that are in the final model, times their machines, divided by the
seconds that machines were up, start-up included. Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from common import ROOT, as_words, launch, machine, print_table, save
from goodput_schedule import Event, Interruptions, events
from goodput_score import Work, read_logs, work_of
from torch.distributed import TCPStore

sys.path.insert(0, str(ROOT))  # before benchmarks/, whose data.py is not the room of that name
sys.path.extend([str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "hub")])
import hosts
import runs
from loopback_hub import LoopbackHub

TRAINERS = ("ours", "auto", "trainer", "bare", "light", "torchft")
LATENCY_SECONDS, BYTES_PER_SECOND = 0.2, 20e6
AGAIN_SECONDS, POLL_SECONDS = 0.5, 0.02
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"


class Machines:
    """Hosts with disks, each of which is up or gone, and the command that runs on those."""

    def __init__(self, found: Sequence[hosts.Host], folder: Path) -> None:
        self.hosts, self.folder = found, folder
        self.up = set(range(len(found)))
        self.leaving: set[int] = set()
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.starts = 0
        self.seconds = 0.0
        """Those that machines were up, of all together."""
        self._counted = time.monotonic()
        self._next = dict.fromkeys(range(len(found)), 0.0)
        for number in self.up:
            self.disk(number).mkdir(parents=True)

    def disk(self, number: int) -> Path:
        return self.folder / f"disk-{number}"

    def output(self, number: int) -> Path:
        """What the commands on a machine have printed."""
        return self.folder / f"output-{number}"

    def count(self) -> None:
        """Count the seconds until now."""
        now = time.monotonic()
        self.seconds += len(self.up) * (now - self._counted)
        self._counted = now

    def apply(self, event: Event) -> None:
        """Let it happen."""
        self.count()
        number = event.machine
        if event.kind == "notice":
            self.leaving.add(number)
            if number in self.running:
                self.running[number].send_signal(signal.SIGTERM)
        elif event.kind == "gone":
            self.leaving.discard(number)
            self.up.remove(number)
            self._kill(number)
        else:
            if event.kind == "back empty":
                shutil.rmtree(self.disk(number))
                self.disk(number).mkdir()
            self.up.add(number)

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start the command on each machine that is up and does not run it; `{}` is its number."""
        for number in list(self.running):
            if self.running[number].poll() is not None:
                del self.running[number]
                self._next[number] = time.monotonic() + AGAIN_SECONDS
        for number in self.up - self.leaving - set(self.running):
            if time.monotonic() >= self._next[number]:
                words = [word.replace("{}", str(number)) for word in command]
                with self.output(number).open("ab") as output:
                    self.running[number] = subprocess.Popen(
                        self.hosts[number].inside(words),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        cwd=ROOT,
                    )
                self.starts += 1

    def close(self) -> None:
        self.count()
        for number in range(len(self.hosts)):
            self._kill(number)

    def _kill(self, number: int) -> None:
        """kill -9 for all that runs on a machine. What is connected to it sees that end."""
        while pids := self.hosts[number].processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if (process := self.running.pop(number, None)) is not None:
                process.wait()


def run(
    options: argparse.Namespace,
    name: str,
    found: Sequence[hosts.Host],
    folder: Path,
    due: list[Event],
    mean: float | None,
) -> Machines:
    """Run a trainer to its end, or to the deadline. Without `mean`, it is not paced."""
    machines = Machines(found, folder)
    words = [name, "--folder", str(folder), "--machine", "{}", "--machines", str(len(found))]
    for key in ("steps", "every"):
        words += [f"--{key}", str(getattr(options, key))]
    words += ["--seconds", "0" if mean is None else str(options.seconds)]
    if mean is not None:
        unannounced = 86_400 / mean * (1 - options.notice)
        words += ["--per-day", str(max(1.0, unannounced))]
        words += ["--notice-seconds", str(Interruptions.notice_seconds)]
    with ExitStack() as stack:
        stack.callback(machines.close)
        outside = found[0].outside
        hub = stack.enter_context(LoopbackHub(folder / "hub", outside, new_port=True))
        hub.latency, hub.bytes_per_second = (LATENCY_SECONDS, LATENCY_SECONDS), BYTES_PER_SECOND
        environment = runs.environment(**hub.environment())
        environment |= {"GLOO_SOCKET_IFNAME": hosts.CARD, "OMP_NUM_THREADS": "1"}
        if name == "torchft" or len(found) == 1:
            command = [sys.executable, str(ROOT / "benchmarks" / "goodput_trainers.py"), *words]
            environment["ACCELERATE_USE_CPU"] = "true"
        else:
            store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # as cloud.meet
            environment |= {
                "PET_NNODES": f"1:{len(found)}",
                "PET_RDZV_ENDPOINT": f"{outside}:{store.port}",
                "PET_RDZV_ID": "run",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
            there = {"main_process_port": 0, "gpu_ids": "-1,-1", "dynamo_backend": "NO"}
            command = launch(
                str(runs.rehearsal("ddp_elastic.yaml", folder, 1, **there)),
                "benchmarks/goodput_trainers.py",
                *words,
                options=("--rdzv_backend=c10d", f"--rdzv_conf={RENDEZVOUS}", "--max_restarts=1000"),
            )
        if name == "torchft":
            house = stack.enter_context(lighthouse())
            command += ["--lighthouse", f"http://{outside}:{house.address().rpartition(':')[2]}"]
            environment["PYTHONPATH"] = str(options.torchft)
        begun, due = time.monotonic(), list(due)
        machines.count()
        deadline = begun + options.deadline
        while not (folder / "finished").exists() and time.monotonic() < deadline:
            while due and due[0].at <= time.monotonic() - begun:
                machines.apply(due.pop(0))
            machines.start(command, environment)
            time.sleep(POLL_SECONDS)
    return machines


@contextlib.contextmanager
def lighthouse() -> Iterator[Any]:
    """Where torchft's machines meet."""
    server = import_module("torchft.coordination").LighthouseServer(
        bind="0.0.0.0:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=3000
    )
    try:
        yield server
    finally:
        server.shutdown()


def measure(options: argparse.Namespace, name: str, count: int, folder: Path) -> Iterator[dict]:
    """The figures of one trainer on so many machines: undisturbed, and with each `--mean`."""
    with hosts.hosts(count) as found:
        for mean in (None, *options.mean):
            place, due = folder / f"{name}-{count}-{mean}", []
            if mean is not None:
                how = Interruptions(
                    mean, options.notice, returns=options.returns, empty=options.empty
                )
                due = events(options.seed, count, how, options.deadline)
            begun = time.monotonic()
            machines = run(options, name, found, place, due, mean)
            seconds = time.monotonic() - begun
            computed = read_logs(place)
            work = work_of(computed) if computed else None
            finished = (place / "finished").exists()
            if mean is None:
                if work is None or not finished:
                    print(machines.output(0).read_text(errors="replace")[-2000:])
                    print(f"{name} does not finish undisturbed on {count}", flush=True)
                    return
                calm = work
                continue
            yield {
                "trainer": name,
                "machines": count,
                "mean": mean,
                "finished": finished,
                "notice": options.notice,
                "empty": options.empty,
                "steps": options.steps,
                "every": options.every,
                "seed": options.seed,
                "gone": sum(one.kind == "gone" and one.at < seconds for one in due),
                "seconds": seconds,
                "machine_seconds": machines.seconds,
                "starts": machines.starts,
                **({} if work is None or not finished else compared(work, calm, machines.seconds)),
            }


def compared(work: Work, calm: Work, machine_seconds: float) -> dict[str, float]:
    """The figures of a run's work, beside those of the undisturbed one."""
    return {
        "goodput": work.useful_seconds / machine_seconds,
        "steps_lost": work.steps_lost,
        "rows_twice": (work.rows - calm.rows).total(),
        "rows_never": (calm.rows - work.rows).total(),
        "last_loss": work.last_loss,
        "from_calm": work.last_loss / calm.last_loss - 1,
    }


def main() -> None:
    """Measure, and print a table."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--machines", nargs="+", type=int, default=[2])
    parser.add_argument(
        "--mean", nargs="+", type=positive, default=[30.0, 120.0], metavar="SECONDS"
    )
    parser.add_argument("--notice", type=float, default=0.5, help="share of interruptions")
    parser.add_argument("--returns", type=float, default=0.8, help="share of machines")
    parser.add_argument("--empty", type=float, default=0.5, help="share of disks")
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a step on one machine")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("--folder", type=Path, default=None, help="keeps what is written")
    parser.add_argument("--torchft", type=Path, default=None, help="where it is installed")
    options = parser.parse_args()
    if options.torchft is not None:
        sys.path.append(str(options.torchft))
    print(as_words(machine()))
    headers = ["trainer", "machines", "mean s", "gone", "goodput", "lost s", "steps lost"]
    headers += ["rows twice", "rows never", "last loss, from undisturbed"]
    figures = []
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for count in options.machines:
            for name in options.trainers:
                if name == "torchft" and options.torchft is None:
                    continue
                for one in measure(options, name, count, folder):
                    figures.append(one)
                    print(*cells(one), flush=True)
    print_table(headers, [cells(one) for one in figures])
    save("goodput", figures)


def positive(text: str) -> float:
    """A number above 0. Raises ValueError."""
    if (number := float(text)) <= 0:
        raise ValueError
    return number


def cells(one: dict[str, Any]) -> list[object]:
    """A row of the table."""
    row = [one["trainer"], one["machines"], f"{one['mean']:g}", one["gone"]]
    if not one["finished"]:
        return [*row, f"not finished in {one['seconds']:.0f} s", *[""] * 5]
    lost = one["machine_seconds"] * (1 - one["goodput"])
    row += [f"{one['goodput']:.1%}", f"{lost:.0f}", one["steps_lost"], one["rows_twice"]]
    return [*row, one["rows_never"], f"{one['last_loss']:.5f}, {one['from_calm']:+.1e}"]


if __name__ == "__main__":
    main()
