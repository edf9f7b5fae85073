"""cloud/Dockerfile: what it promises. No Docker executes it here."""

from __future__ import annotations

import os
import re
import subprocess
import time

import pytest

import images
import runs
from tracked import SOURCES, name_of

DOCKERFILE = runs.ROOT / "cloud" / "Dockerfile"


def test_the_image_is_pinned_and_its_user_is_nobody_special():
    image = images.instructions(DOCKERFILE)
    assert re.fullmatch(r"debian:\d+\.\d+-slim", image["FROM"])
    assert image["USER"] == "trainer"
    assert image["ARG TORCH_INDEX"] == "https://pypi.org/simple"


def test_signals_reach_the_attempts_through_an_init():
    assert images.entrypoint(DOCKERFILE) == ["tini", "--", "python", "-m", "cloud.attempts"]
    assert images.instructions(DOCKERFILE)["STOPSIGNAL"] == "SIGTERM"


def test_the_builder_is_sent_all_that_runs_and_nothing_else():
    needed = {name_of(path).split("/")[0] for path in SOURCES}
    files = {"LICENSE", "accelerate_configs", "requirements.txt", "requirements-models.txt"}
    assert set(images.sent()) == needed | files


@pytest.mark.parametrize(("minutes", "healthy"), [(0, True), (25, True), (35, False)])
def test_healthy_is_a_run_that_has_written_metrics_lately(tmp_path, minutes, healthy):
    metrics = tmp_path / "out" / "run" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.touch()
    then = time.time() - 60 * minutes
    os.utime(metrics, (then, then))
    (metrics.parent / "config.yaml").touch()  # of a start, which is no sign of life
    check = ["sh", "-c", images.instructions(DOCKERFILE)["HEALTHCHECK"]]
    assert (subprocess.run(check, cwd=tmp_path, check=False).returncode == 0) == healthy
