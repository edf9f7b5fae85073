"""Machines that come and go: hosts of a test network, and a store outside of them to meet at."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

import runs
from hosts import Host, hosts

PORT = 29400
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
VARIABLES = (
    *("PET_NNODES", "PET_RDZV_ENDPOINT", "PET_RDZV_ID"),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)
"""What the user gives to every machine."""
FROM = re.compile(r"^run .*, from .*step-0*(\d+)", re.MULTILINE)
SLOW = runs.ROOT / "tests" / "support" / "slow_steps.py"
STEP_SECONDS = 0.2


class Machines:
    """Hosts with a disk each, on which the same command joins one run."""

    def __init__(self, found: list[Host], config: Path, folder: Path, words: list[str]) -> None:
        self.hosts, self.config, self.folder, self.words = found, config, folder, words
        self.alive: dict[int, subprocess.Popen] = {}
        self._starts = 0
        self._stack = contextlib.ExitStack()

    def run_dir(self, number: int) -> Path:
        """The run's directory on a host."""
        return self.folder / f"disk{number}" / "run"

    def said(self, number: int) -> str:
        """What the newest command on a host has printed."""
        path = self.folder / f"said{number}"
        return path.read_text() if path.exists() else ""

    def join(self, *numbers: int) -> None:
        """Start the command on these hosts."""
        for number in numbers:
            host, disk = self.hosts[number], self.folder / f"disk{number}"
            options = ("--rdzv_backend=c10d", f"--rdzv_conf={RENDEZVOUS}", "--max_restarts=1000")
            places = (f"run.dir={disk / 'run'}", f"data.cache_dir={disk / 'data'}")
            words = runs.launch_command(
                self.config,
                *(str(STEP_SECONDS), *self.words, *places),
                options=options,
                script=SLOW,
            )
            least = 2 if "fsdp" in self.config.name else 1
            values = (f"{least}:{len(self.hosts)}", f"{host.outside}:{PORT}", "run", "1")
            variables = dict(zip(VARIABLES, values, strict=True))
            started = host.start(words, into=self.folder / f"said{number}", **variables)
            self.alive[number] = self._stack.enter_context(started)

    def kill(self, *numbers: int) -> None:
        """kill -9 for all that runs on these hosts, whose connections then end."""
        for number in numbers:
            for pid in self.hosts[number].processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
            del self.alive[number]

    def lose_power(self, *numbers: int) -> None:
        """Take the power of these hosts: nobody is told. They boot, without a command."""
        for number in numbers:
            self.hosts[number].kill()
            self.hosts[number].boot()
            del self.alive[number]

    def notify(self, *numbers: int) -> None:
        """SIGTERM for the launcher of these hosts, and wait for its end."""
        for number in numbers:
            launcher = next(
                process
                for process in map(psutil.Process, self.hosts[number].processes())
                if "accelerate.commands.launch" in process.cmdline()
                and "RANK" not in process.environ()
            )
            launcher.send_signal(signal.SIGTERM)
            self.alive.pop(number).wait(runs.DEADLINE_SECONDS)

    def newest_step(self) -> int:
        """The last step whose metrics any disk has."""
        return max(runs.newest_step(self.run_dir(number)) for number in range(len(self.hosts)))

    def metrics(self) -> list[dict]:
        """The lines of the disk that has the most."""
        folders = [self.run_dir(number) for number in range(len(self.hosts))]
        there = [runs.metrics(one) for one in folders if (one / "metrics.jsonl").exists()]
        return max(there, key=len)

    def go_on(self, deadline: float = 240) -> int:
        """Wait until all that are alive train together; returns the last step before they did."""
        end = time.monotonic() + deadline
        before: int | None = None
        while before is None or self._reached() < before + 3:
            if before is None and self._are_together():
                before = self.newest_step()
            for number, process in self.alive.items():
                assert process.poll() is None, f"host {number} ended:\n{self.said(number)}"
            assert time.monotonic() < end, "\n\n".join(map(self.said, self.alive))
            time.sleep(0.02)
        return before

    def resumed_at(self) -> int:
        """The step from which the newest attempt goes on."""
        found = FROM.findall(self.said(min(self.alive)))
        return int(found[-1]) if found else 0

    def stop(self) -> None:
        """SIGTERM for all launchers."""
        self.notify(*self.alive)

    def close(self) -> None:
        """kill -9 for what is left."""
        self._stack.close()

    def _reached(self) -> int:
        return max(runs.newest_step(self.run_dir(number)) for number in self.alive)

    def _are_together(self) -> bool:
        """Whether each host has workers that are as many as the hosts."""
        sizes = {}
        for number in self.alive:
            for pid in self.hosts[number].processes():
                with contextlib.suppress(psutil.Error):
                    if size := psutil.Process(pid).environ().get("WORLD_SIZE"):
                        sizes[number] = int(size)
        return set(sizes) == set(self.alive) and set(sizes.values()) == {len(self.alive)}


@contextlib.contextmanager
def machines(count: int, config: str, folder: Path, *words: str) -> Iterator[Machines]:
    """So many hosts, none of which runs anything yet."""
    with hosts(count) as found:
        meet = [sys.executable, "-m", "cloud.meet", str(PORT)]
        store = subprocess.Popen(meet, stdout=subprocess.PIPE, text=True, cwd=runs.ROOT)
        assert store.stdout is not None
        with store.stdout:
            assert store.stdout.readline() == f"machines can meet here, at port {PORT}\n"
            file = runs.rehearsal(config, folder, 1, main_process_port=0, gpu_ids="-1,-1")
            several = Machines(found, file, folder, list(words))
            try:
                yield several
            finally:
                several.close()
                store.kill()
                store.wait()
