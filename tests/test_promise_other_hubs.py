"""Promises 2, 3 and 4 at a server that differs from huggingface.co in all that we have met.

Tests of other files, run once more at a hub with every deviation of loopback_deviations: no error
codes, no whoami, no paths-info, parents ignored, prefixed hashes, commit ids of 64 digits, no
squash, no Xet and nobody who told the client so. In one process, and each by itself:
test_hub_servers.py.
"""

from __future__ import annotations

import pytest
from test_promise_hub_faults import (  # noqa: F401 - pytest collects them here, with this file's hub
    test_takeover_replaces_what_another_run_has_there,
)
from test_promise_hub_resume import (  # noqa: F401
    test_a_damaged_repo_is_passed_over_and_said,
    test_a_new_run_begins_from_a_repo,
    test_sample_speaks_from_a_repo,
)

import loopback_deviations
from loopback_hub import LoopbackHub


@pytest.fixture
def hub(tmp_path):
    """A hub with every deviation."""
    with LoopbackHub(tmp_path / "hub", deviations=loopback_deviations.ALL) as hub:
        yield hub
