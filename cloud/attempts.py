"""The attempts of a run in a container or a job: `accelerate launch train.py`, until it is done.

    python -m cloud.attempts --restarts 20 --config_file accelerate_configs/cpu.yaml train.py ...

It does what `accelerate launch` does not: it exits with the run's own code, forwards a SIGTERM that
reaches only this process, and stops the run when the cloud announces the end of this machine.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from cloud.notice import CLOUDS, EVERY_SECONDS, has_notice
from training import exits

RUN_DIR = "out/run"
FINAL = (exits.EXIT_DONE, exits.EXIT_USER_MISTAKE, exits.EXIT_INTERRUPTED, exits.EXIT_TERMINATED)
"""Codes after which another attempt would do nothing, fail again, or not be wanted."""
LONGEST_DELAY_SECONDS = 300.0


class Attempts:
    """Runs a command again until it is done, fails for good, or is stopped by a signal."""

    def __init__(self, command: Sequence[str], run_dir: Path) -> None:
        self._command, self._run_dir = command, run_dir
        self._launcher: subprocess.Popen[bytes] | None = None
        self._stopped, self._cause, self._is_taken_back = threading.Event(), 0, False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._forward)

    def run(self, most: int, final: Sequence[int], first_delay_seconds: float = 5.0) -> int:
        """The exit code of the last attempt; that for another machine once this is taken back.

        Attempts end at a code in `final`, or after `most` restarts in a row without a new snapshot.
        The delay before an attempt doubles with each of these restarts.
        """
        fruitless, before = 0, self._newest_snapshot()
        while True:
            code, newest = self._attempt(), self._newest_snapshot()
            fruitless, before = (fruitless + 1 if newest == before else 0), newest
            if most == 0 or code in final or self._stopped.is_set():
                break
            if fruitless > most:
                print(f"exit code {code}: giving up after {most} restarts without a new snapshot")
                break
            delay = min(first_delay_seconds * 2 ** min(fruitless, 10), LONGEST_DELAY_SECONDS)
            print(f"exit code {code}: the next attempt begins in {delay:.0f} s", flush=True)
            if self._stopped.wait(delay):
                break
        return exits.EXIT_AGAIN if self._is_taken_back and code not in final else code

    def watch(self, clouds: Sequence[str], address: str | None) -> None:
        """Stop the run, and start it no more, once one of the clouds takes this machine back."""
        while not any(has_notice(name, address) for name in clouds):
            time.sleep(EVERY_SECONDS)
        print("the cloud takes this machine back, so the run stops", file=sys.stderr)
        self._is_taken_back = True
        self._stopped.set()
        self._send(signal.SIGUSR1)  # an attempt that only just begins dies of it

    def _attempt(self) -> int:
        code_file = self._run_dir / "exit_code"
        self._run_dir.mkdir(parents=True, exist_ok=True)  # a refused run does not create it
        if exits.exit_code_in(code_file) is not None:  # a file of that name may be the user's
            code_file.unlink()
        self._launcher = subprocess.Popen(self._command)
        if self._stopped.is_set():  # a signal came between two attempts
            self._launcher.terminate()
        status = self._launcher.wait()
        if (code := exits.exit_code_in(code_file)) is not None:
            return code
        if self._cause:  # a signal came before the run could leave a code
            return 128 + self._cause  # the convention of shells
        return status if status >= 0 else exits.EXIT_FAILED

    def _newest_snapshot(self) -> str:
        return max((path.name for path in self._run_dir.glob("snapshots/step-*")), default="")

    def _forward(self, number: int, _: object) -> None:
        if number != signal.SIGUSR1:  # SIGUSR1 requests another attempt
            self._cause = number
            self._stopped.set()
        if number == signal.SIGINT and sys.stdin.isatty():
            return  # a terminal sends Ctrl-C to all of its processes itself
        self._send(number)

    def _send(self, number: int) -> None:
        """Signal the processes that train, or the launcher as long as it has started none.

        The launcher of a single process would die of a signal and leave that process alone.
        """
        if self._launcher is None or self._launcher.returncode is not None:
            return
        with suppress(psutil.Error):
            launcher = psutil.Process(self._launcher.pid)
            for process in launcher.children() or [launcher]:
                with suppress(psutil.Error):
                    process.send_signal(number)


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and those of `accelerate launch`. Exits with 2 at a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m cloud.attempts",
        usage="%(prog)s [options] [options of accelerate launch] train.py key=value ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--restarts", type=int, default=0, help="most restarts in a row without a new snapshot")
    again = f"no restart here after code {exits.EXIT_AGAIN}"
    add("--again-elsewhere", action="store_true", help=again)
    add("--notice", choices=("auto", *CLOUDS), help="stop when this cloud takes the machine back")
    add("--notice-address", metavar="URL", help="where to ask, in place of the cloud's own address")
    options, launch = parser.parse_known_args(words)
    if "train.py" not in launch:
        parser.error("train.py is missing after the options of accelerate launch")
    if options.restarts < 0:
        parser.error(f"--restarts {options.restarts}: must be at least 0")
    return options, launch


def main(words: Sequence[str]) -> int:
    """Run the attempts; the exit code of the last one."""
    options, launch = parse(words)
    given = [word.removeprefix("run.dir=") for word in launch if word.startswith("run.dir=")]
    run_dir = given[-1] if given else RUN_DIR
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, f"run.dir={run_dir}"]
    attempts = Attempts(command, Path(run_dir))
    if options.notice is not None:
        clouds = list(CLOUDS) if options.notice == "auto" else [options.notice]
        watched = (clouds, options.notice_address)
        threading.Thread(target=attempts.watch, args=watched, daemon=True).start()
    final = (*FINAL, exits.EXIT_AGAIN) if options.again_elsewhere else FINAL
    return attempts.run(options.restarts, final)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
