"""The notice of a cloud that it takes this machine back, for `cloud.attempts --notice`.

Each cloud has a metadata address that only its machines can reach. It announces the end of a spot
machine 30 seconds to two minutes ahead.
"""

from __future__ import annotations

import json
from http.client import HTTPException
from urllib.request import ProxyHandler, Request, build_opener

EVERY_SECONDS = 2.0
"""How often to ask: Google's notice comes 30 seconds before the end."""
ANSWER_SECONDS = 2.0
LARGEST_ANSWER = 1 << 20
NO_ANSWER = (OSError, HTTPException, ValueError, KeyError, TypeError)


def on_aws(address: str) -> bool:
    """Amazon's: each request needs a token, and the page is missing until there is a notice."""
    token = "X-aws-ec2-metadata-token"
    own = _read(f"{address}/latest/api/token", {f"{token}-ttl-seconds": "60"}, "PUT")
    notice = _read(f"{address}/latest/meta-data/spot/instance-action", {token: own})
    return json.loads(notice)["action"] in ("terminate", "stop", "hibernate")


def on_gcp(address: str) -> bool:
    """Google's."""
    page = f"{address}/computeMetadata/v1/instance/preempted"
    return _read(page, {"Metadata-Flavor": "Google"}).strip().upper() == "TRUE"


def on_azure(address: str) -> bool:
    """Azure's, which tells every machine of a scale set about all of them."""
    name = f"{address}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    machine = _read(name, {"Metadata": "true"}).strip()
    page = f"{address}/metadata/scheduledevents?api-version=2020-07-01"
    events = json.loads(_read(page, {"Metadata": "true"}))["Events"]
    return any(e["EventType"] == "Preempt" and machine in e["Resources"] for e in events)


CLOUDS = {
    "aws": (on_aws, "http://169.254.169.254"),
    "gcp": (on_gcp, "http://metadata.google.internal"),
    "azure": (on_azure, "http://169.254.169.254"),
}
"""By name, how a cloud is asked, and its metadata address."""


def has_notice(cloud: str, address: str | None) -> bool:
    """Whether a cloud announces the end of this machine; not if it gives no sound answer."""
    asked, usual = CLOUDS[cloud]
    try:
        return asked(address or usual)
    except NO_ANSWER:
        return False


def _read(page: str, headers: dict[str, str], method: str = "GET") -> str:
    """The answer, without a proxy. Raises OSError, also for an HTTP error."""
    request = Request(page, headers=headers, method=method)
    with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_SECONDS) as opened:
        return str(opened.read(LARGEST_ANSWER).decode())
