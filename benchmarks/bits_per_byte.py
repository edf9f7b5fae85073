"""Bits per byte with characters and with BPE, in equal time: the tuned character run, in turns.

    python benchmarks/bits_per_byte.py --source <Tiny Shakespeare> --sizes 512 1024

The model, its context in tokens, and all other keys stay those of experiment=shakespeare_char_cpu;
only `data.tokenizer` and the number of steps change: as many are taken as fit into the time of the
character run, measured over `--probe` steps before. The loss is that of all held-out text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import as_words, launch, machine, median, print_table, save, spread

EXPERIMENT = "shakespeare_char_cpu"
STEPS = 1120
"""Of the experiment."""
NANO_GPT = 1.898
"""The widely quoted nats per character of nanoGPT's run on a CPU, of 2,000 steps."""
BITS_OF_A_NAT = 1.442695


def run(folder: Path, name: str, *words: str) -> dict:
    """The seconds in all steps of a run, and its last evaluation."""
    given = [f"experiment={EXPERIMENT}", f"run.dir={folder / name}", *words]
    command = launch("cpu.yaml", "train.py", *given, f"data.cache_dir={folder / 'data'}")
    subprocess.run(command, capture_output=True, check=True)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    tokens = 12 * 64
    seconds = sum(tokens / r["tokens_per_second"] for r in records if r["event"] == "train")
    last = [record for record in records if record["event"] == "eval"][-1]
    return {"seconds": seconds, "loss": last["loss"], "bits_per_byte": last["bits_per_byte"]}


def main() -> None:
    """Print a row for each tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="a path of Tiny Shakespeare")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--probe", type=int, default=200)
    options = parser.parse_args()
    print(as_words(machine()))
    names = ["char", *(f"bpe:{size}" for size in options.sizes)]
    found: dict[str, list[dict]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            common = [f"data.source={options.source}", f"train.seed={turn + 1}"]
            seconds: float | None = None
            for name in names:
                words, steps = [*common, f"data.tokenizer={name}"], STEPS
                place = f"{name.replace(':', '')}-{turn}"
                if seconds is not None:
                    short = f"train.max_steps={options.probe}"
                    probe = run(Path(folder), f"{place}-probe", *words, short)
                    steps = round(seconds / probe["seconds"] * options.probe)
                result = run(Path(folder), place, *words, f"train.max_steps={steps}")
                seconds = result["seconds"] if seconds is None else seconds
                found[name].append({**result, "steps": steps})
                print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    rows = [
        (
            name,
            spread([one["steps"] for one in results], 0),
            spread([one["seconds"] for one in results], 1),
            spread([one["loss"] for one in results], 4),
            spread([one["bits_per_byte"] for one in results], 4),
            f"{median([one['bits_per_byte'] for one in results]) / (NANO_GPT * BITS_OF_A_NAT):.3f}",
        )
        for name, results in found.items()
    ]
    print_table(
        (
            "data.tokenizer",
            "steps",
            "seconds in steps",
            "nats per token",
            "bits per byte",
            f"of nanoGPT's {NANO_GPT * BITS_OF_A_NAT:.3f}",
        ),
        rows,
    )
    save("bits_per_byte", found)


if __name__ == "__main__":
    main()
