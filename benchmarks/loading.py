"""The memory in which each process gets its weights, compared with the share that it keeps.

    python benchmarks/loading.py [--megabytes 1000] [--processes 2 4] [--new]

A random Llama is saved in several files and loaded by train.py under FSDP on the CPU; with --new,
train.py draws new weights for it instead. The peak is that of resident memory from before the model
is built until it has its weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from harness import ROOT, as_words, launch, machine, print_table, save
from measured import PeakMemory, local_bytes

sys.path.insert(0, str(ROOT))
WIDTH = 1024
PER_LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH


def make(folder: Path, megabytes: int) -> None:
    """Save a random Llama of so many MB in float32, in files of at most 200 MB."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=max(1, round(megabytes * 1e6 / 4 / PER_LAYER)),
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=8192,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="200MB")


def measured(folder: Path) -> None:
    """Run train.py and stop after the weights are loaded. Writes <process>.json."""
    from training.run import session
    from training.run.command import run_command
    from training.run.pretrained import PretrainedModel

    build, fill = PretrainedModel.build, session.fill_weights
    memory: list[PeakMemory] = []

    def measured_build(self, *rest):
        import transformers.models.llama.modeling_llama  # noqa: F401  # its import is not the model's memory

        memory.append(PeakMemory())
        return build(self, *rest)

    def measured_fill(accelerator, pretrained, start, model, optimizer, seed):
        fill(accelerator, pretrained, start, model, optimizer, seed)
        tensors = list(model.parameters())
        found = {
            "peak": memory[0].added(),
            "stays": psutil.Process().memory_info().rss - memory[0].before,
            "share": local_bytes(tensors),
            "largest": max(one.numel() * one.element_size() for one in tensors),
        }
        process = accelerator.process_index
        (folder / f"{process}.json").write_text(json.dumps(found))
        accelerator.wait_for_everyone()
        sys.exit(0)

    PretrainedModel.build, session.fill_weights = measured_build, measured_fill
    import train

    run_command(train.main)


def main() -> None:
    """Print a line for each process, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--new", action="store_true", help="new weights, not those of the files")
    options = parser.parse_args()
    print(as_words(machine()))
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "base"
        make(base, options.megabytes)
        for processes in options.processes:
            folder = Path(place) / str(processes)
            folder.mkdir()
            command = launch(
                "fsdp_cpu.yaml",
                "benchmarks/loading.py",
                str(folder),
                f"model.{'architecture' if options.new else 'pretrained'}={base}",
                "data.block_size=64",
                "data.tokenizer=char",
                f"run.dir={folder}/run",
                f"data.cache_dir={place}/data",
                options=(f"--num_processes={processes}",),
            )
            subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
            for process in range(processes):
                found = json.loads((folder / f"{process}.json").read_text())
                allowed = found["share"] + found["largest"]
                figures.append({"processes": processes, "process": process, **found})
                sizes = (found["share"], found["largest"], found["peak"], found["stays"])
                row = (processes, process, *(f"{size / 1e6:.0f}" for size in sizes))
                rows.append((*row, f"{found['peak'] / allowed:.2f}"))
    print_table(
        ("processes", "process", "share MB", "largest MB", "peak MB", "stays MB", "peak / (1 + 2)"),
        rows,
    )
    save("new_weights_memory" if options.new else "loading", figures)


if __name__ == "__main__":
    if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir():
        measured(Path(sys.argv.pop(1)))
    else:
        main()
