"""Start a command, and tell its run when the cloud announces that it takes this machine back.

    python -m cloud.notice auto -- accelerate launch --config_file ... train.py ...

Each cloud has a metadata address that only its machines can reach. It announces the end of a spot
machine 30 seconds to two minutes ahead. The run then gets SIGUSR1, and stops with a snapshot. This
process ends with the command, and with its exit code.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import psutil

EVERY_SECONDS = 2.0
"""How often to ask: Google's notice comes 30 seconds before the end."""
ANSWER_SECONDS = 2.0
SEARCH_SECONDS = 60.0
"""How long `auto` looks for the cloud of this machine: its network may come up late."""
LARGEST_ANSWER = 1 << 20
TOKEN_PATH, TOKEN = "/latest/api/token", "X-aws-ec2-metadata-token"
NO_ANSWER = (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class Cloud:
    """The metadata service of a cloud."""

    address: str
    name_path: str
    """Answers with the name of the machine, on every machine of this cloud."""
    notice_path: str
    is_notice: Callable[[str, str], bool]
    """Whether an answer announces the end of the machine with this name."""
    headers: dict[str, str] = field(default_factory=dict)
    """Empty where each request needs a token."""


def _preempts(answer: str, machine: str) -> bool:
    """Azure tells every machine of a scale set about all of them."""
    events = json.loads(answer)["Events"]
    return any(one["EventType"] == "Preempt" and machine in one["Resources"] for one in events)


CLOUDS = {
    "aws": Cloud(
        "http://169.254.169.254",
        "/latest/meta-data/instance-id",
        "/latest/meta-data/spot/instance-action",  # 404 until there is a notice
        lambda answer, _: json.loads(answer)["action"] in ("terminate", "stop", "hibernate"),
    ),
    "gcp": Cloud(
        "http://metadata.google.internal",
        "/computeMetadata/v1/instance/name",
        "/computeMetadata/v1/instance/preempted",
        lambda answer, _: answer.strip().upper() == "TRUE",
        {"Metadata-Flavor": "Google"},
    ),
    "azure": Cloud(
        "http://169.254.169.254",
        "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
        "/metadata/scheduledevents?api-version=2020-07-01",
        _preempts,
        {"Metadata": "true"},
    ),
}


def find_cloud(name: str, address: str | None) -> Cloud | None:
    """The cloud of this name; for `auto` the first that answers, None if none does in a minute."""
    if name != "auto":
        return CLOUDS[name]
    until = time.monotonic() + SEARCH_SECONDS
    while time.monotonic() < until:
        for cloud in CLOUDS.values():
            with suppress(*NO_ANSWER):
                _ask(cloud, address, cloud.name_path)
                return cloud
        time.sleep(EVERY_SECONDS)
    return None


def has_notice(cloud: Cloud, address: str | None) -> bool:
    """Whether the cloud announces the end of this machine; not if it gives no sound answer."""
    try:
        machine = _ask(cloud, address, cloud.name_path).strip()
        return cloud.is_notice(_ask(cloud, address, cloud.notice_path), machine)
    except NO_ANSWER:
        return False


def _ask(cloud: Cloud, address: str | None, path: str) -> str:
    """The answer to a request, without a proxy. Raises OSError, also for an HTTP error."""
    start, headers = address or cloud.address, cloud.headers
    if not headers:
        lifetime = {f"{TOKEN}-ttl-seconds": "60"}
        headers = {TOKEN: _read(Request(start + TOKEN_PATH, headers=lifetime, method="PUT"))}
    return _read(Request(start + path, headers=headers))


def _read(request: Request) -> str:
    with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_SECONDS) as opened:
        return str(opened.read(LARGEST_ANSWER).decode())


def tell(process: psutil.Process, number: int) -> bool:
    """Send a signal to the processes nearest to `process` that handle it; False if none does.

    A launcher would die of SIGUSR1 and leave its workers untold, and so would a run that has not
    begun to handle signals.
    """
    with suppress(psutil.Error, OSError):
        if _handles(process.pid, number):
            process.send_signal(number)
            return True
        told = [tell(child, number) for child in process.children()]
        return any(told)
    return False


def _handles(pid: int, number: int) -> bool:
    """Whether a process of Linux has a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(int(line[7:], 16) >> number - 1 & 1 for line in lines if line[:7] == "SigCgt:")


def watch(name: str, address: str | None, process: psutil.Process) -> None:
    """Tell the run again as long as there is a notice: an attempt may only just begin."""
    cloud, told = find_cloud(name, address), False
    if cloud is None:
        print("cloud.notice: no cloud has answered. Notices are not watched.", file=sys.stderr)
    while cloud is not None:
        if has_notice(cloud, address) and tell(process, signal.SIGUSR1) and not told:
            told = True
            print("cloud.notice: this machine goes, so the run stops.", file=sys.stderr)
        time.sleep(EVERY_SECONDS)


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the command. Exits with 2 at a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m cloud.notice",
        usage="%(prog)s [--address URL] {auto,aws,gcp,azure} -- command ...",
        description="Run a command, and stop its run when the cloud takes this machine back.",
        allow_abbrev=False,
    )
    parser.add_argument("cloud", choices=("auto", *CLOUDS), help="whose notice to watch for")
    parser.add_argument("--address", help="http://..., in place of the cloud's own")
    end = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:end]), list(words[end + 1 :])
    if not command:
        parser.error("a command is missing: write -- and then accelerate launch ...")
    return options, command


def main(words: Sequence[str]) -> int:
    """Run the command; its exit code, or 128 + the signal that ended it."""
    options, command = parse(words)
    started = subprocess.Popen(command)
    process = psutil.Process(started.pid)

    def forward(number: int, _: object) -> None:
        if number == signal.SIGINT and sys.stdin.isatty():
            return  # a terminal sends Ctrl-C to all of its processes itself
        if not tell(process, number) and number != signal.SIGUSR1:
            started.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, forward)
    watching = (options.cloud, options.address, process)
    threading.Thread(target=watch, args=watching, daemon=True).start()
    code = started.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
