"""The notice of a cloud that it takes this machine back, for `cloud.attempts --notice`.

Each cloud has a metadata address that only its machines can reach. It announces the end of a spot
machine 30 seconds to two minutes ahead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.request import ProxyHandler, Request, build_opener

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
