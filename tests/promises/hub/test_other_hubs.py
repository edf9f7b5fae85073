"""Promises 2, 3 and 4 at a server that differs from huggingface.co in all that we have met.

Two tests of test_promise_hub_resume, once more at a hub with every deviation of
loopback_deviations. Each by itself, and in one process: test_hub_servers.
"""

from __future__ import annotations

import pytest
from test_promise_hub_resume import (  # noqa: F401 - collected here, they get this file's hub
    test_a_damaged_repo_is_passed_over_and_said,
    test_a_new_run_begins_from_a_repo,
)

from loopback_deviations import ALL
from loopback_hub import LoopbackHub


@pytest.fixture
def hub(tmp_path):
    """A hub with every deviation."""
    with LoopbackHub(tmp_path / "hub", deviations=ALL) as hub:
        yield hub
