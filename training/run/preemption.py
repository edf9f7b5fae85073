"""The notice of a cloud that it takes this spot machine back, 30 seconds to two minutes ahead.

Each cloud has a metadata service that only its machines can reach. A notice ends the run as SIGUSR1
does: with a snapshot, its upload, and the exit code that asks for a restart.
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
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from config.schema import RunConfig
from training.distributed.environment import is_local_main_process
from training.reporting.console import say_error
from training.run.signals import PREEMPTED, Signals

EVERY_SECONDS = 2.0
"""How often to ask: Google's notice comes 30 seconds before the end."""
ANSWER_SECONDS = 2.0
SEARCH_SECONDS = 60.0
"""How long `auto` looks for the cloud of this machine: its network may come up late."""
LARGEST_ANSWER = 1 << 20
TOKEN_SECONDS = 21_600


def _is_aws(answer: str, _: str) -> bool:
    return json.loads(answer).get("action") in ("terminate", "stop", "hibernate")


def _is_gcp(answer: str, _: str) -> bool:
    return answer.strip().upper() == "TRUE"


def _is_azure(answer: str, machine: str) -> bool:
    """The service tells every machine of a scale set about all of them."""
    return any(
        event.get("EventType") == "Preempt" and machine.strip() in event.get("Resources", [])
        for event in json.loads(answer)["Events"]
    )


@dataclass(frozen=True)
class Cloud:
    """The metadata service of a cloud."""

    address: str
    path: str
    is_notice: Callable[[str, str], bool]
    """Whether an answer is a notice, given the answer and the name of this machine."""
    known_by: str
    """A path that returns the name of the machine, at once, on every machine of this cloud."""
    headers: dict[str, str] = field(default_factory=dict)
    token_path: str = ""
    """The path that issues a token for the requests, if they need one."""


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
    if is_local_main_process():
        threading.Thread(target=_watch, args=(run, signals), name="notice", daemon=True).start()


def _watch(run: RunConfig, signals: Signals) -> None:
    name = run.preemption_notice
    cloud = _find_cloud(run.metadata_address) if name == "auto" else CLOUDS[name]
    if cloud is None:
        say_error(f"run.preemption_notice={name}: no cloud has answered. Notices are not watched.")
    stop = signals.stop  # for a notice from before this attempt, nobody knows how old it is
    while cloud is not None and signals.cause is None:
        answer = _has_notice(cloud, run.metadata_address)
        if answer:
            stop(PREEMPTED)
            return
        if answer is False:
            stop = signals.notice
        time.sleep(EVERY_SECONDS)


def _find_cloud(address: str | None) -> Cloud | None:
    """The cloud of this machine; None if no cloud answers within a minute."""
    until = time.monotonic() + SEARCH_SECONDS
    while time.monotonic() < until:
        for cloud in CLOUDS.values():
            with suppress(OSError, HTTPException, ValueError, KeyError, TypeError):
                _ask(cloud, address, cloud.known_by)
                return cloud
        time.sleep(EVERY_SECONDS)
    return None


def _has_notice(cloud: Cloud, address: str | None) -> bool | None:
    """Whether the cloud announces a preemption; None without an answer that can be read."""
    try:
        machine = _ask(cloud, address, cloud.known_by)
        return cloud.is_notice(_ask(cloud, address, cloud.path), machine)
    except HTTPError:  # 404, mostly
        return False
    except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError):
        return None


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
