"""The notice of a cloud that it takes this machine back, for `cloud.attempts --notice`.

Each cloud has a metadata address that only its machines can reach. It announces the end of a spot
machine 30 seconds to two minutes ahead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPException
from urllib.request import ProxyHandler, Request, build_opener

EVERY_SECONDS = 2.0
"""How often to ask: Google's notice comes 30 seconds before the end."""
ANSWER_SECONDS = 2.0
LARGEST_ANSWER = 1 << 20
TOKEN_PATH, TOKEN = "/latest/api/token", "X-aws-ec2-metadata-token"
NO_ANSWER = (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class Cloud:
    """The metadata service of a cloud: its address, paths and headers."""

    address: str
    name_path: str
    """Answers with the name of the machine, which Azure's notices list."""
    notice_path: str
    headers: dict[str, str]
    """Empty where each request needs a token."""


CLOUDS = {
    "aws": Cloud(
        "http://169.254.169.254",
        "/latest/meta-data/instance-id",
        "/latest/meta-data/spot/instance-action",  # 404 until there is a notice
        {},
    ),
    "gcp": Cloud(
        "http://metadata.google.internal",
        "/computeMetadata/v1/instance/name",
        "/computeMetadata/v1/instance/preempted",
        {"Metadata-Flavor": "Google"},
    ),
    "azure": Cloud(
        "http://169.254.169.254",
        "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
        "/metadata/scheduledevents?api-version=2020-07-01",
        {"Metadata": "true"},
    ),
}


def has_notice(cloud: Cloud, address: str | None) -> bool:
    """Whether the cloud announces the end of this machine; not if it gives no sound answer."""
    start, headers = address or cloud.address, cloud.headers
    try:
        if not headers:
            lifetime = {f"{TOKEN}-ttl-seconds": "60"}
            headers = {TOKEN: _read(Request(start + TOKEN_PATH, headers=lifetime, method="PUT"))}
        machine = _read(Request(start + cloud.name_path, headers=headers)).strip()
        answer = _read(Request(start + cloud.notice_path, headers=headers))
        if answer.strip().upper() in ("TRUE", "FALSE"):  # Google
            return answer.strip().upper() == "TRUE"
        content = json.loads(answer)
        if "Events" not in content:  # Amazon
            return content["action"] in ("terminate", "stop", "hibernate")
        # Azure tells every machine of a scale set about all of them.
        events = [event for event in content["Events"] if event["EventType"] == "Preempt"]
        return any(machine in event["Resources"] for event in events)
    except NO_ANSWER:
        return False


def _read(request: Request) -> str:
    """The answer, without a proxy. Raises OSError, also for an HTTP error."""
    with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_SECONDS) as opened:
        return str(opened.read(LARGEST_ANSWER).decode())
