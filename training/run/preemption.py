"""The notice of a cloud that it takes this machine back, in two minutes or in half of one.

Each cloud has an address, reachable from its machines only, that tells of it. A notice ends the run
as SIGUSR1 does: a snapshot, its upload, and the exit code that asks to be started again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from config.schema import RunConfig
from training.distributed.environment import is_local_main_process
from training.reporting.output import say_error
from training.run.signals import PREEMPTED, Signals

EVERY_SECONDS = 2.0
"""How often the address is asked: Google's notice comes half a minute before the end."""
ANSWER_SECONDS = 2.0
SEARCH_SECONDS = 60.0
"""How long `auto` looks for the cloud of this machine, whose network may come up late."""
LARGEST_ANSWER = 1 << 20
TOKEN_SECONDS = 21_600


def _is_aws(answer: str, _: str) -> bool:
    return json.loads(answer).get("action") in ("terminate", "stop", "hibernate")


def _is_gcp(answer: str, _: str) -> bool:
    return answer.strip().upper() == "TRUE"


def _is_azure(answer: str, machine: str) -> bool:
    """All machines of a set are told of each."""
    return any(
        event.get("EventType") == "Preempt" and machine.strip() in event.get("Resources", [])
        for event in json.loads(answer)["Events"]
    )


@dataclass(frozen=True)
class Cloud:
    """Where a cloud tells of a preemption, and how."""

    address: str
    path: str
    is_notice: Callable[[str, str], bool]
    """From the answer, and the name of this machine."""
    known_by: str
    """A path that answers at once on every machine of this cloud, with the machine's name."""
    headers: dict[str, str] = field(default_factory=dict)
    token_path: str = ""
    """Where a token for the requests comes from, if they need one."""


CLOUDS = {
    "aws": Cloud(
        "http://169.254.169.254",
        "/latest/meta-data/spot/instance-action",  # 404 until there is a notice
        _is_aws,
        "/latest/meta-data/instance-id",
        token_path="/latest/api/token",
    ),
    "gcp": Cloud(
        "http://metadata.google.internal",
        "/computeMetadata/v1/instance/preempted",
        _is_gcp,
        "/computeMetadata/v1/instance/name",
        {"Metadata-Flavor": "Google"},
    ),
    "azure": Cloud(
        "http://169.254.169.254",
        "/metadata/scheduledevents?api-version=2020-07-01",
        _is_azure,
        "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
        {"Metadata": "true"},
    ),
}


def watch_for_preemption(run: RunConfig, signals: Signals) -> None:
    """Ask for a notice in the background, in the first process of each machine."""
    if run.preemption_notice != "none" and is_local_main_process():
        threading.Thread(target=_watch, args=(run, signals), name="notice", daemon=True).start()


def _watch(run: RunConfig, signals: Signals) -> None:
    name = run.preemption_notice
    cloud = _found(run.metadata_address) if name == "auto" else CLOUDS[name]
    if cloud is None:
        say_error(f"run.preemption_notice={name}: no cloud has answered. Notices are not watched.")
    while cloud is not None and signals.cause is None:
        if _has_notice(cloud, run.metadata_address):
            signals.stop(PREEMPTED)
        time.sleep(EVERY_SECONDS)


def _found(address: str | None) -> Cloud | None:
    """The cloud of this machine; None after a minute without an answer of any."""
    until = time.monotonic() + SEARCH_SECONDS
    while time.monotonic() < until:
        for cloud in CLOUDS.values():
            with suppress(OSError, HTTPException, ValueError, KeyError, TypeError):
                _ask(cloud, address, cloud.known_by)
                return cloud
        time.sleep(EVERY_SECONDS)
    return None


def _has_notice(cloud: Cloud, address: str | None) -> bool:
    """Whether the cloud tells of a preemption. What cannot be read is none."""
    with suppress(OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError):
        machine = _ask(cloud, address, cloud.known_by)
        return cloud.is_notice(_ask(cloud, address, cloud.path), machine)
    return False


def _ask(cloud: Cloud, address: str | None, path: str) -> str:
    """The answer to a request, without a proxy. Raises OSError, also for an HTTP error."""
    opener, start = build_opener(ProxyHandler({})), address or cloud.address
    headers = dict(cloud.headers)

    def answer(request: Request) -> str:
        with opener.open(request, timeout=ANSWER_SECONDS) as opened:
            content: Any = opened.read(LARGEST_ANSWER)
        return str(content.decode())

    if cloud.token_path:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        token = answer(Request(start + cloud.token_path, headers=lifetime, method="PUT"))
        headers["X-aws-ec2-metadata-token"] = token
    return answer(Request(start + path, headers=headers))
