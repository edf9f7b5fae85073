"""What several test files share: a small text, a small configuration, and real runs of train.py."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

# Float sums depend on the number of threads; children inherit this. Before torch, which reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

# Under nohup the suite would hand an ignored SIGHUP to every run.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import hubs
import runs
from disks import Tmpfs, mounted
from loopback_hub import LoopbackHub

TESTS = Path(__file__).parent

# The marker of a folder's tests, wherever that folder lies.
MARKED = {"hub": "hub", "store": "hub"} | {
    name: name for name in ("signals", "slurm", "network", "gpu")
}


# The files that take longest, longest first: a worker that took one of them last would be alone.
LONGEST = [
    "promises/hub/test_hub_faults.py",
    "promises/hub/test_stores.py",
    "integration/test_plan.py",
    "promises/signals/test_signals.py",
    "promises/test_any_shape.py",
    "promises/hub/test_hub_resume.py",
    "integration/test_pretrained.py",
    "promises/test_precision.py",
    "promises/test_stream.py",
    "promises/test_fsdp.py",
    "promises/test_adapters.py",
    "promises/test_any_snapshot.py",
    "unit/store/test_upkeep.py",
    "integration/slurm/test_slurm.py",
    "integration/test_trace.py",
    "promises/test_wrong_input.py",
    "integration/repository/test_readme.py",
    "integration/signals/test_attempts.py",
    "unit/snapshot/test_shards.py",
    "integration/hub/test_hf_job.py",
    "unit/support/test_preload.py",
    "unit/store/test_hub_waiting.py",
    "unit/config/test_config.py",
    "promises/test_whole_snapshots.py",
    "promises/test_kill.py",
    "unit/data/test_subword_corpus.py",
    "unit/data/hub/test_text_hub.py",
    "unit/training/distributed/test_distribution.py",
    "unit/store/test_records.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test as its folder says, and have the longest files first.

    A test that gives up root's rights is about permissions.
    """
    for item in items:
        folders = item.path.relative_to(TESTS).parts[:-1]
        for marker in {MARKED[name] for name in folders if name in MARKED}:
            item.add_marker(marker)
        code = getattr(item.function, "__code__", None)
        if code is not None and {"as_anybody", "as_nobody"} & {*code.co_names}:
            item.add_marker("permissions")
    place = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))  # keeps the order within


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """About 20,000 characters of made-up sentences, the same at every run."""
    chosen = random.Random(7)
    words = "the run goes on where it was and no step is lost or done twice by any worker"
    vocabulary = words.split()
    lines = [" ".join(chosen.choices(vocabulary, k=9)).capitalize() + "." for _ in range(500)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small(text_file, tmp_path_factory) -> list[str]:
    """The overrides of a run that takes seconds: two layers, 32 wide, eight sequences of 16."""
    return [
        f"data.source={text_file}",
        f"data.cache_dir={tmp_path_factory.mktemp('cache')}",
        "data.block_size=16",
        "model.n_layer=2",
        "model.n_head=2",
        "model.n_embd=32",
        "optim.name=adamw",
        "optim.learning_rate=0.003",
        "optim.warmup_steps=5",
        "train.global_batch_size=8",
        "train.max_steps=30",
        "train.eval_every=15",
        "train.eval_batches=200",
        "train.log_every=1",
        "train.sample_every=0",  # 400 tokens cost more than 30 steps
        "snapshot.every=10",
    ]


@pytest.fixture(scope="session")
def finished_run(small, tmp_path_factory) -> Path:
    """The directory of a small run that went through undisturbed, with dropout and a sample."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    words = [*small, "model.dropout=0.1", "train.sample_every=30"]
    runs.train(*words, f"run.dir={run_dir}", code=0)
    return run_dir


@pytest.fixture
def snapshot_of(finished_run, tmp_path):
    """A whole snapshot of any step, no tensor of which is another's."""

    def of(step: int) -> Path:
        return hubs.copied(runs.snapshot(finished_run, 30), tmp_path / "made" / "snapshots", step)

    return of


@pytest.fixture
def a_run(finished_run, tmp_path):
    """A run in the default directory of its name, with the snapshots of the steps 10 to 30."""
    run_dir = tmp_path / "out" / "mine"
    for step in (10, 20, 30):
        shutil.copytree(runs.snapshot(finished_run, step), runs.snapshot(run_dir, step))
    return run_dir


@pytest.fixture
def hub(tmp_path):
    """A loopback Hub without a repo."""
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture(params=["Xet"])
def near_hub(tmp_path, monkeypatch, request):
    """A hub to which the client of this process is led; what fails is soon tried again."""
    hubs.hurry(monkeypatch)
    use_xet = request.param == "Xet"
    with LoopbackHub(new_port=True, use_xet=use_xet) as hub:
        hubs.lead_here(hub, monkeypatch)
        yield hub


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 4 MB."""
    with mounted(tmp_path / "disk", lambda: Tmpfs(tmp_path / "disk")) as disk:
        yield disk


@pytest.fixture
def repo(near_hub):
    """An empty repo of a run on `near_hub`."""
    return near_hub.create(hubs.REPO)
