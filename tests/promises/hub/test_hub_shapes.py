"""Promises 2 to 4 in every shape, shared sequences and matrices included."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import families
import hubs
import runs
from kills import after_a_rename, inside_a_step, inside_the_writing, kill_at
from shapes import SHAPES

STEPS = 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"),
    [*(("gpt", shape) for shape in SHAPES), ("llama", "tp 2"), ("llama", "tp 2 x shard 2")],
)
def test_killed_at_five_moments_and_moved_to_another_machine(small, tmp_path, hub, model, shape):
    config = SHAPES[shape].file(tmp_path)
    # Wide enough that gradients are summed in parts, in an order that depends on their place.
    wide = ["model.n_embd=64", "model.n_head=4", "model.dropout=0.1"]
    shared = [*small, *wide, "train.eval_every=50", f"train.max_steps={STEPS}"]
    if model != "gpt":
        base = families.make(model, tmp_path / "base", hidden_size=64, attention_dropout=0.1)
        shared = [word for word in shared if not word.startswith(("model.n_", "model.dropout"))]
        shared += [f"model.pretrained={base}"]
    undisturbed, here, there = (tmp_path / name for name in ("undisturbed", "here", "there"))
    whole = runs.launch(config, *shared, f"run.dir={undisturbed}")
    assert whole.returncode == 0, whole.stderr
    assert SHAPES[shape].is_named_in(whole.stdout)

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
