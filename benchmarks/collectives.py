"""What a step of three micro-batches sends: collectives and bytes under each strategy.

    OMP_NUM_THREADS=1 python benchmarks/collectives.py [--root <another checkout>] [--only <word>]

trace.py counts in process 0, with what processes agree on. With --root another version is traced,
without the rows of keys that it lacks.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import ROOT, as_words, machine, print_table

ROWS = (
    ("DDP on 2", "ddp_cpu.yaml", ()),
    ("DDP on 2, bf16", "ddp_cpu.yaml", ("run.reduce_dtype=bf16",)),
    ("DDP on 2, a Llama of transformers", "ddp_cpu.yaml", ("model.architecture={llama}",)),
    ("FSDP on 2", "fsdp_cpu.yaml", ()),
    ("FSDP on 2, bf16", "fsdp_cpu.yaml", ("run.reduce_dtype=bf16",)),
    ("FSDP on 2, sent once", "fsdp_cpu.yaml", ("run.sync_each_micro_batch=false",)),
    ("hybrid, 2 x 2", "fsdp_hybrid_cpu.yaml", ()),
    ("hybrid, 2 x 2, sent once", "fsdp_hybrid_cpu.yaml", ("run.sync_each_micro_batch=false",)),
    ("shared matrices on 2", "tp_cpu.yaml", ()),
    ("shared matrices on 2, FSDP on 2", "fsdp_tp_cpu.yaml", ()),
    ("shared sequences on 2", "cp_cpu.yaml", ()),
)
"""Name, shipped config file, and overrides of train.py."""
PARTS = {"fsdp_hybrid_cpu.yaml": 4, "tp_cpu.yaml": 1, "cp_cpu.yaml": 1}
"""Parts of a global batch, if they are not 2."""
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
LLAMA = """{"model_type": "llama", "vocab_size": 103, "hidden_size": 128, "intermediate_size": 352,
"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64}"""


def traced(root: Path, config: str, words: tuple[str, ...], folder: Path) -> tuple[str, ...] | None:
    """Calls and bytes of each kind; None without the key."""
    own = [f"run.dir={folder / 'run'}", "data.cache_dir=" + str(folder / "data")]
    own += ["optim.name=adamw", "train.micro_batch_size=2"]
    own += [f"train.global_batch_size={6 * PARTS.get(config, 2)}", "data.tokenizer=char"]
    words = tuple(word.format(llama=folder / "llama") for word in words)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    launch += ["--config_file", str(root / "accelerate_configs" / config)]
    result = subprocess.run(
        [*launch, str(root / "trace.py"), *own, *words],
        cwd=root,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    if "There is no key" in result.stdout + result.stderr:
        return None
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    found = re.findall(r"^(\S.*?)  +([\d,]+) +([\d,]+)  ", result.stdout, re.M)
    rows = {kind: (calls, size) for kind, calls, size in found}
    return tuple(" / ".join(rows.get(kind, ("0", "0"))) for kind in KINDS)


def main() -> None:
    """Print a row for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--only", default="", help="the rows whose name has this word")
    options = parser.parse_args()
    root = options.root.resolve()
    print(as_words(machine()))
    rows = []
    for name, config, words in (row for row in ROWS if options.only in row[0]):
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "llama").mkdir()
            (Path(place) / "llama" / "config.json").write_text(LLAMA)
            cells = traced(root, config, words, Path(place))
        if cells is not None:
            rows.append((name, *cells))
    heads = ("calls / bytes a step", *KINDS)
    empty = [column for column in range(len(heads)) if all(row[column] == "0 / 0" for row in rows)]
    kept = [column for column in range(len(heads)) if column not in empty]
    print_table([heads[one] for one in kept], [[row[one] for one in kept] for row in rows])


if __name__ == "__main__":
    main()
