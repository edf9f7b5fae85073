"""A start imports what its first step needs; the rest would be seconds, in every process."""

from __future__ import annotations

import json
import subprocess
import sys

import runs
from preload import environment

HEAVY = [
    "datasets",
    "huggingface_hub.hf_api",
    "matplotlib",
    "pandas",
    "pyarrow.parquet",
    "sympy",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers",
]
RUN = f"""
import json, sys
import train
from training.run.command import run_command
from training.run.session import Session

finish_step = Session.finish_step

def reporting(session, step, *rest):
    print("imported:", json.dumps([name for name in {HEAVY} if name in sys.modules]))
    return finish_step(session, step, *rest)

Session.finish_step = reporting
run_command(train.main)
"""


def test_nothing_heavy_is_imported_before_the_first_step(small, tmp_path):
    """Of a run of one process that resumes: it does all that a new one does, and reads files.

    Its vocabulary is larger than the model is wide: nothing is recomputed for that, because what
    torch has for it imports its compiler.
    """
    words = [*small, "model.n_embd=16", f"run.dir={tmp_path / 'run'}"]
    assert runs.train(*words, "train.max_steps=1").returncode == 0
    run = subprocess.run(
        [sys.executable, "-c", RUN, *words, "train.max_steps=2"],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=runs.ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("imported: "))
    assert json.loads(line.removeprefix("imported: ")) == []
