"""The environment of the processes that prove.py starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from training.distributed.launcher import launched

OF_OTHER_PROCESSES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "FSDP_", "PARALLELISM_CONFIG_"),
)
"""Beginnings of what a launcher sets for one of several workers, and for how they share a model."""


def for_attempt(port: int, alone: bool, in_float32: bool) -> dict[str, str]:
    """The environment of a process that does this worker's part of another attempt.

    Its processes meet at `port` of the first machine. `alone`, it is the only one of them, and
    has the whole model. With `in_float32` it computes in that, whatever the config file says.
    """
    changes = {"MASTER_PORT": str(port)} if launched() and not alone else {}
    if in_float32:
        changes["ACCELERATE_MIXED_PRECISION"] = "no"
    # The launcher of the attempt is another one.
    removed = ("TORCHELASTIC_", *(OF_OTHER_PROCESSES if alone else ()))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    return kept | changes


def for_helpers(root: Path) -> dict[str, str]:
    """Variables for the processes of `multiprocessing` that serve this program in `root`.

    They import from there, and not what a current folder has under the same name (seen with the
    fork server of Python 3.11, which ignores sys.path). They draw into files. Semaphores of killed
    processes are removed without a warning.
    """
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    before, warnings = os.environ.get("PYTHONPATH"), os.environ.get("PYTHONWARNINGS")
    return {
        "PYTHONSAFEPATH": "1",
        "MPLBACKEND": "agg",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), before))),
        "PYTHONWARNINGS": ",".join(filter(None, (warnings, quiet))),
    }


def replace_environment(variables: Mapping[str, str]) -> None:
    """Give this process another environment."""
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment with other variables, as long as a block runs."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        replace_environment(before)
