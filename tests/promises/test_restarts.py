"""Promise 2 under --max_restarts: a worker dies, all start again, and nobody notices."""

from __future__ import annotations

import random
import re
import statistics
import time
from pathlib import Path

import pytest

import runs

STEPS_A_KILL = 120
EVERY = 20
LONGEST_MEDIAN_SECONDS = 20
"""Or twice what this machine takes to start the run, where that is longer."""


def newest_complete(run_dir: Path) -> int:
    """The step of the newest complete snapshot of a run that is being trained; 0: none yet."""
    folders = run_dir.glob("snapshots/step-????????")
    return max((int(folder.name.removeprefix("step-")) for folder in folders), default=0)


MANY = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("config", "processes", "kills"),
    [
        pytest.param("ddp_cpu.yaml", 2, 10, marks=MANY),
        pytest.param("fsdp_cpu.yaml", 3, 10, marks=MANY),
        pytest.param("ddp_cpu.yaml", 2, 1, marks=pytest.mark.thorough),
    ],
)
def test_workers_killed_at_any_moment_leave_no_trace(small, tmp_path, config, processes, kills):
    """Any one of them so often; the launcher and the run have to do the rest."""
    steps = STEPS_A_KILL * kills if kills > 1 else STEPS_A_KILL * 2 // 3 + EVERY
    overrides = [
        *small,
        "model.dropout=0.1",
        "train.global_batch_size=12",
        f"train.max_steps={steps}",
        "train.eval_every=100",
        f"snapshot.every={EVERY}",
    ]
    options = (f"--num_processes={processes}", "--max_restarts=20")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    words = runs.launch_command(config, *overrides, f"run.dir={undisturbed}", options=options)
    whole = runs.run(words, code=0)
    assert f"{processes} processes" in whole.stdout
    chosen = random.Random(2026)
    words = runs.launch_command(config, *overrides, f"run.dir={killed}", options=options)
    waits, reached_at, complete_at = [], [], []
    said, launched = tmp_path / "said", time.monotonic()
    with runs.started(words, into=said, forked=kills == 1) as launcher:
        runs.wait_until(lambda: runs.newest_step(killed) > 0, launcher)
        start = time.monotonic() - launched
        for number in range(kills):
            # Spread over the run, each somewhere between two snapshots, and clear of its end.
            first = number * STEPS_A_KILL
            runs.wait_until(lambda m=first: runs.newest_step(killed) > m, launcher)
            victim = runs.workers(launcher)[chosen.randrange(processes)]
            moment = first + chosen.randrange(1, STEPS_A_KILL * 2 // 3)
            runs.wait_until(lambda m=moment: runs.newest_step(killed) >= m, launcher)
            complete_at.append(newest_complete(killed))
            victim.kill()
            died, reached = time.monotonic(), runs.newest_step(killed)
            reached_at.append(reached)
            runs.wait_until(lambda r=reached: runs.newest_step(killed) > r, launcher)
            waits.append(time.monotonic() - died)
        launcher.wait(timeout=runs.DEADLINE_SECONDS)
    output = said.read_text()
    assert launcher.returncode == 0, output
    starts = [int(step) for step in re.findall(r"/step-(\d+), the newest of this run", output)]
    redone = [reached - there for reached, there in zip(reached_at, starts, strict=True)]
    median = statistics.median(waits)
    print(f"{config}, {processes} processes, {kills} kills: at most {max(redone)} steps done again")
    print(f"from the kill to the next new step: {median:.1f} s, at most {max(waits):.1f} s")
    # What was complete is never lost; the next snapshot waits until the one before is complete.
    assert all(there >= complete for there, complete in zip(starts, complete_at, strict=True))
    assert max(redone) <= 2 * EVERY
    assert median <= max(LONGEST_MEDIAN_SECONDS, 2 * start)
    runs.assert_same_bits(runs.snapshot(undisturbed, steps), runs.snapshot(killed, steps))
    assert runs.losses(killed) == runs.losses(undisturbed)
