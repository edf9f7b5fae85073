"""Time to a loss: this project's recipes and those they are compared with, as complete commands.

    python benchmarks/time_to_loss.py --source <Tiny Shakespeare>
    python benchmarks/time_to_loss.py --text python-docs
    python benchmarks/time_to_loss.py --source <Tiny Shakespeare> --before <older checkout>

All are timed in turns, as a user starts them, with all cores of the CPU: from the launch to the end
of the process, with evaluations, samples and snapshots. The loss is that of the held-out text.
`--before` compares with the recipe and the code of an older commit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, as_words, commit_of, launch, machine, median, print_table, save, spread

SHAKESPEARE, DOCS = "shakespeare", "python-docs"
BEFORE = "before"
FILES = {SHAKESPEARE: "time_to_loss", DOCS: "time_to_loss-docs"}
ADAMW = (
    "optim.name=adamw optim.schedule=cosine optim.learning_rate=5e-3 optim.warmup_steps=50 "
    "model.n_layer=2 model.n_embd=176 model.n_head=4 train.global_batch_size=12 "
    "train.max_steps=1120 train.eval_every=560 train.sample_every=560"
)
RECIPES = {
    SHAKESPEARE: {
        "shakespeare_char_cpu": ["experiment=shakespeare_char_cpu"],
        "the best one found with AdamW": ["experiment=shakespeare_char_cpu", *ADAMW.split()],
        "shakespeare_char_cpu_reference": ["experiment=shakespeare_char_cpu_reference"],
    },
    DOCS: {
        "the default run": [],
        "AdamW": ["optim.name=adamw", "optim.learning_rate=3e-3", "train.max_steps=2000"],
    },
}
"""For each text the best recipe, and those that it is compared with: in the ratios, the last."""


def complete_run(words: list[str], run_dir: Path, turn: int, root: Path) -> tuple[float, float]:
    """Seconds of the complete command in a checkout, and the held-out loss in nats."""
    words = [*words, f"run.dir={run_dir}/{turn}", f"train.seed={turn + 1}"]
    words.append(f"data.cache_dir={run_dir}/data")  # turn 0 prepares the text
    command = launch("cpu.yaml", "train.py", *words, root=root)
    started_at = time.perf_counter()
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seconds = time.perf_counter() - started_at
    return seconds, float(re.findall(r"held-out loss ([\d.]+)", output)[-1])


def main() -> None:
    """Print a row for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", choices=RECIPES, default=SHAKESPEARE)
    parser.add_argument("--source", help="a path of Tiny Shakespeare")
    parser.add_argument("--before", type=Path, help="an older checkout, to compare with it alone")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    recipes, file = RECIPES[options.text], FILES[options.text]
    if options.before is not None:
        ours, words = next(iter(recipes.items()))
        recipes, file = {ours: words, BEFORE: words}, f"{file}-before"
    source = [] if options.source is None else [f"data.source={options.source}"]
    print(as_words(machine()))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in recipes}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            for i, name in enumerate(recipes) if turn % 2 else [*enumerate(recipes)][::-1]:
                words = [*recipes[name], *source]
                root = options.before.resolve() if name == BEFORE else ROOT
                found[name].append(complete_run(words, Path(folder, str(i)), turn, root))
                print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    seconds = {name: [one[0] for one in results] for name, results in found.items()}
    last = [*seconds.values()][-1]
    ratios = {
        name: [mine / theirs for mine, theirs in zip(times, last, strict=True)]
        for name, times in seconds.items()
    }
    print_table(
        ("recipe", "whole command, s", "held-out loss, nats", "of the last one's time"),
        [
            (
                name,
                spread(seconds[name], 1),
                spread([one[1] for one in found[name]], 4),
                f"{median(ratios[name]):.2f}",
            )
            for name in recipes
        ],
    )
    ours = next(iter(recipes))
    before = {} if options.before is None else {BEFORE: commit_of(options.before)}
    save(file, {"found": found, "ratios": ratios[ours], **before})


if __name__ == "__main__":
    main()
