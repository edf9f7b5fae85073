"""cloud/Dockerfile: what it promises, and its steps in a clean Debian without Docker."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest

import hubs
import images
import runs
from images import CPU_INDEX
from tracked import SOURCES, name_of
from training import exits

DOCKERFILE = runs.ROOT / "cloud" / "Dockerfile"


def test_the_image_is_pinned_and_its_user_is_nobody_special():
    image = images.read(DOCKERFILE)
    assert re.fullmatch(r"debian:\d+\.\d+-slim", image.base)
    assert image.user == "trainer"
    assert image.arguments["TORCH_INDEX"] == "https://pypi.org/simple"
    assert f"TORCH_INDEX={CPU_INDEX}" in DOCKERFILE.read_text()


def test_signals_reach_the_attempts_through_an_init():
    image = images.read(DOCKERFILE)
    assert image.entrypoint == ["tini", "--", "python", "-m", "cloud.attempts"]
    assert image.stop_signal == "SIGTERM"


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
    check = ["sh", "-c", images.read(DOCKERFILE).health]
    assert (subprocess.run(check, cwd=tmp_path, check=False).returncode == 0) == healthy


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> images.Image:
    """The Dockerfile's steps, executed in what debootstrap makes of the same Debian.

    TORCH_INDEX in the environment is the build argument, where PyTorch's index is out of reach.
    """
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root, and debootstrap")
    folder = tmp_path_factory.mktemp("image") / "root"
    made = ["debootstrap", "--variant=minbase", "bookworm", str(folder)]
    result = subprocess.run(made, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"no Debian: {result.stdout[-300:]}")
    index = os.environ.get("TORCH_INDEX", CPU_INDEX)
    return images.read(DOCKERFILE, folder, build=True, TORCH_INDEX=index)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_stopped_container_keeps_its_code_and_the_next_resumes(image, hub, tmp_path):
    version = (image.folder / "etc" / "debian_version").read_text().strip()
    assert version.split(".")[0] == re.findall(r"\d+", image.base)[0]
    small = ["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "data.block_size=16"]
    small += ["train.global_batch_size=8", "train.log_every=1", "train.eval_every=1000000"]
    small += [f"hub.repo_id={hubs.REPO}", "hub.min_interval_seconds=0", "snapshot.every=50"]
    launch = ["--config_file=accelerate_configs/cpu.yaml", "train.py", *small]
    out = image.folder / "app" / "out"

    def container(*words: str) -> list[str]:
        variables = {**hub.environment(), "OMP_NUM_THREADS": "1"}
        return image.run(*image.entrypoint, *launch, *words, **variables)

    said = tmp_path / "said"
    with runs.started(container("train.max_steps=1000000"), said, forked=False) as process:
        runs.wait_until(lambda: runs.newest_step(out / "run") > 60, process)
        checked = subprocess.run(image.run("sh", "-c", image.health), check=False)
        (first,) = psutil.Process(process.pid).children()
        assert first.name() == "tini"
        assert set(first.uids()) == {1000}
        first.send_signal(getattr(signal, image.stop_signal))
        assert process.wait(60) == exits.EXIT_TERMINATED, said.read_text()
    assert checked.returncode == 0
    reached = runs.newest_step(out / "run")
    assert hubs.step_of(hub) == reached
    shutil.rmtree(out / "run")  # another machine
    result = runs.run(
        container(f"train.max_steps={reached + 20}"), forked=False, code=exits.EXIT_DONE
    )
    assert f"step-{reached:08d}, fetched from {hubs.REPO}@" in result.stdout
    runs.run(container("train.max_stepz=5"), forked=False, code=exits.EXIT_USER_MISTAKE)
    assert compiles(image)


def compiles(image: images.Image) -> bool:
    """Whether torch.compile works in it, as some accelerate config files request."""
    code = "import torch; print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(3)))"
    result = runs.run(image.run("python", "-c", code), forked=False, code=0)
    return "tensor([1., 1., 1.])" in result.stdout
