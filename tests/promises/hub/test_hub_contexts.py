"""Promises 2 to 4 where processes share each sequence: killed at any moment, with the same bits."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import hubs
import runs
from kills import after_a_rename, inside_a_step, inside_the_writing, kill_at

STEPS = 100


@pytest.mark.parametrize(
    ("processes", "shards"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow, id="alone"),
        pytest.param(4, 2, marks=pytest.mark.slow, id="sharded"),
    ],
)
def test_killed_at_five_moments_and_moved_to_another_machine(
    small, tmp_path, hub, processes, shards
):
    changes = {"parallelism_config_dp_shard_size": shards}
    config = runs.rehearsal("cp_cpu.yaml", tmp_path, processes, **changes)
    # Wide enough that gradients are summed in parts, in an order that depends on their place.
    wide = ["model.n_embd=64", "model.dropout=0.1", "train.eval_every=50"]
    shared = [*small, *wide, f"train.max_steps={STEPS}"]
    undisturbed, here, there = (tmp_path / name for name in ("undisturbed", "here", "there"))
    whole = runs.launch(config, *shared, f"run.dir={undisturbed}")
    assert whole.returncode == 0, whole.stderr
    assert f"{processes} processes, CPU" in whole.stdout

    def words(run_dir: Path) -> list[str]:
        return runs.launch_command(config, *shared, *hubs.words(run_dir, "run.name=run"))

    def inside_an_upload(run_dir: Path, chosen: random.Random):
        """The Hub has a snapshot, and has since been asked for more."""
        asked: list[int] = []

        def moment() -> bool:
            if not asked and hubs.latest(hub):
                asked.append(len(hub.requests) + chosen.randrange(1, 8))
            return bool(asked) and len(hub.requests) >= asked[0]

        return moment

    hub.latency = (0.0, 0.03)
    chosen = random.Random(5)
    moments = [inside_a_step, inside_the_writing, after_a_rename, inside_the_writing]
    for moment in (*moments, inside_an_upload):
        hit = kill_at(words(here), moment(here, chosen), tmp_path / "said", **hub.environment())
        assert hit, (moment.__name__, (tmp_path / "said").read_text())
    shutil.rmtree(here)
    rest = runs.run(words(there), **hub.environment())
    assert rest.returncode == 0, rest.stderr
    assert f"fetched from {hubs.REPO}@" in rest.stdout
    runs.assert_same_bits(runs.snapshot(undisturbed, STEPS), runs.snapshot(there, STEPS))
    assert runs.losses(there) == runs.losses(undisturbed)
    assert runs.metrics(there, "eval") == runs.metrics(undisturbed, "eval")
