"""The grace of the scheduler that started this process: seconds from its SIGTERM to its SIGKILL."""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple

from training.distributed.launcher import env_var

KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+) sec", re.MULTILINE)
ANSWER_SECONDS = 10
POD_SECONDS = 30.0
"""Kubernetes' default of terminationGracePeriodSeconds, which a pod cannot read."""


class Grace(NamedTuple):
    """Seconds, and what to say of them; infinite and nothing without a scheduler."""

    seconds: float = float("inf")
    said: str = ""


def grace() -> Grace:
    """What the scheduler gives, as far as a process can tell."""
    if env_var("SLURM_JOB_ID", "") and (seconds := _kill_wait()) is not None:
        return Grace(seconds, f" (Slurm's KillWait is {seconds:g} s)")
    if env_var("KUBERNETES_SERVICE_HOST", ""):
        said = f" (Kubernetes gives {POD_SECONDS:g} s, if terminationGracePeriodSeconds is not set)"
        return Grace(POD_SECONDS, said)
    return Grace()


def _kill_wait() -> float | None:
    """Slurm's KillWait, in seconds; None if its controller does not answer."""
    try:
        answer = subprocess.run(
            ["scontrol", "show", "config"],
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = KILL_WAIT.search(answer.stdout)
    return None if found is None else float(found[1])
