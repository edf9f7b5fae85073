"""Will it fit? The memory of each process under each strategy, without a GPU.

python plan.py model=gpt2_xl data.block_size=1024 --processes 4 --memory 24
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from dataclasses import replace

import torch

from common.command import exit_code_of
from config.compose import load_config
from config.removed import removed_option
from config.schema import (
    Config,
    ConfigError,
    gpt_config,
    lora_of,
    other_model,
    refuse_uneven_chunks,
    too_long,
)
from data.columns import PACKED
from data.split import Split
from data.tokenizer import bpe_size
from model.causal_lm import quiet_transformers
from model.families import build_model
from model.family import LanguageModel, ModelConfig, parameter_count
from model.frozen import FLOAT32
from planning.cards import CARDS
from planning.fake_trace import DTYPES, Shape
from planning.fits import GIB, OFFLOADED, Fit, advise, micro_batch_that_fits, strategies
from snapshot.command_line import POSITIVE_INT, bounded
from snapshot.disk.model import check_described, layout_for, read_config
from snapshot.disk.tensors import snapshot_bytes
from snapshot.errors import SnapshotError
from snapshot.named_model import open_base
from store.errors import StoreError
from training.distributed.sharing import refuse_shared_matrices, refuse_sharing
from training.step import freeze

CHARACTERS_PLANNED = 256
STORED_AS = {"bfloat16": "bf16", "float16": "fp16"}
"""`model.frozen_dtype` by the dtype in a config.json."""


def main(arguments: list[str]) -> int:
    """Print the plan; return the exit code: 3 if nothing fits, 2 for a user error."""
    options = parse(arguments)
    return exit_code_of(lambda: plan(options), ConfigError, SnapshotError, StoreError)


def plan(options: argparse.Namespace) -> int:
    """Print the plan; return the exit code."""
    config = load_config(options.overrides)
    fits, split, model = planned(options, config)
    requested, words = config.train.micro_batch_size, [*options.overrides]
    if requested is None and split.accumulation > 1:  # otherwise train.py takes all at once
        words.append(f"train.micro_batch_size={split.micro_batch}")
    print_plan(config, model, options, fits, split)
    advice, code = advise(fits, requested, options.machines, words)
    print(f"\n{advice}")
    return code


def planned(options: argparse.Namespace, config: Config) -> tuple[list[Fit], Split, LanguageModel]:
    """The strategies, from the fastest to the lowest memory, the division of a step, and the model.

    Raises ConfigError, SnapshotError and StoreError for what cannot be planned.
    """
    memory = GIB * memory_of(options)
    check_processes(options, config)
    sizes, stored_as = planned_model(options, config)
    with torch.device("meta"):
        freeze(model := build_model(sizes), config.optim.freeze)
    check_sharing(options, config, model)
    shape = Shape(
        device=options.device,
        precision=options.precision,
        processes=options.processes,
        context=options.context,
        tensor=options.tensor,
        optimizer=config.optim.name,
        freeze=tuple(config.optim.freeze),
        frozen_dtype=config.model.frozen_dtype,
        stored_as=stored_as,
        packed=config.data.documents != PACKED and sizes.can_pack,
        sync_each=config.run.sync_each_micro_batch,
    )
    candidates = [*strategies(sizes, shape, options.machines)]
    sequences, micro = config.train.global_batch_size, config.train.micro_batch_size
    if micro is None:
        of_each = Split.of(sequences, None, shape.parts).micro_batch
        micro = micro_batch_that_fits(candidates, of_each, memory)
    split = Split.of(sequences, micro, shape.parts)
    fits = [one.fit(memory, split.micro_batch, split.accumulation > 1) for one in candidates]
    return fits, split, model


def check_processes(options: argparse.Namespace, config: Config) -> None:
    """Raise ConfigError if machines or sequences cannot be divided among processes."""
    sizes = {"context": options.context, "tensor": options.tensor}
    sharing = " x ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
    for named, size in (
        (f"--machines {options.machines}", options.machines),
        (sharing, options.context * options.tensor),
    ):
        if options.processes % size:
            raise ConfigError(f"--processes {options.processes} is not a multiple of {named}.")
    refuse_uneven_chunks(config, options.context)


def check_sharing(options: argparse.Namespace, config: Config, model: LanguageModel) -> None:
    """Raise ConfigError if processes cannot share the model as --context and --tensor say."""
    context, tensor = options.context, options.tensor
    if tensor > 1:
        refuse_shared_matrices(config, options.precision)
    refuse_sharing(model, context, tensor, f"--context {context}", f"--tensor {tensor}")


def planned_model(options: argparse.Namespace, config: Config) -> tuple[ModelConfig, str]:
    """The sizes of the model, and the dtype of its weights as far as its config.json says it.

    For a Hub model only that file is downloaded. Raises SnapshotError and StoreError if it is not a
    usable model, ConfigError for a context longer than the model's.
    """
    sizes = config.model
    if (named := other_model(sizes)) is None:
        ours = gpt_config(config, vocabulary_of(options, config))
        check_described(layout_for(ours))
        return ours, FLOAT32
    quiet_transformers()
    base = open_base(*named, config.hub.timeout_seconds, with_weights=False)
    base = base.on_text(vocabulary_of(options, config), config.data.block_size)
    model = base.config(sizes.dropout, sizes.activation_checkpointing)
    if config.data.block_size > model.block_size:
        raise ConfigError(too_long(config, base.key, model.block_size))
    model = replace(model, block_size=config.data.block_size, lora=lora_of(sizes))
    check_described(layout_for(model))  # building it raises for adapters it cannot have
    content, _ = read_config(base.folder)
    stored_as = content.get("dtype") or content.get("torch_dtype")
    return model, STORED_AS.get(str(stored_as), FLOAT32)


def vocabulary_of(options: argparse.Namespace, config: Config) -> int:
    """The size of the vocabulary: as given, of `data.tokenizer`, or of many characters."""
    return options.vocab_size or bpe_size(str(config.data.tokenizer)) or CHARACTERS_PLANNED


def print_plan(
    config: Config, model: LanguageModel, options: argparse.Namespace, fits: list[Fit], split: Split
) -> None:
    """Print the table of strategies, with the model above and notes below."""
    sizes, parameters = model.config, parameter_count(model)
    trained = sum(entry.numel() for entry in model.parameters() if entry.requires_grad)
    frozen = f", {trained:,} of them trained" if trained < parameters else ""
    print(
        f"model     {parameters:,} parameters{frozen}: {sizes.n_layer} layers, {sizes.n_head} "
        f"heads, {sizes.n_embd} wide, context {sizes.block_size}, vocabulary {sizes.vocab_size:,}"
    )
    where = f"{options.processes} x {options.device} with {memory_of(options):g} GiB each"
    if options.machines > 1:
        where += f", on {options.machines} machines"
    way = str(config.model.activation_checkpointing).lower()
    print(f"machine   {where}, {options.precision}, activation checkpointing: {way}")
    who = f"{split.parts} processes"
    if split.parts < options.processes:
        who = f"{split.parts} groups of {options.processes // split.parts} processes"
    padding = f", {split.padding} of {split.rows} rows padding" if split.padding else ""
    print(
        f"step      {split.sequences} sequences: {split.micro_batch} in a micro-batch x {who} x "
        f"{split.accumulation} accumulated{padding}"
    )
    print(f"\n{table(fits)}\n")
    print("\n".join(textwrap.fill(note, 95) for note in notes(config, model, fits)))


def table(fits: list[Fit]) -> str:
    """The memory under each strategy in GiB, with what fits and its accelerate config file."""
    heads = ["GiB per process", "weights", "gradients", "optimizer", "activations", "buffers"]
    heads += ["peak", "+ outside", "", "largest micro-batch", "accelerate_configs/"]
    lines = [heads]
    for row in fits:
        sizes = row.kinds.values()
        lines.append(
            [
                row.strategy.name,
                *(f"{size / GIB:.2f}" for size in (*sizes, row.peak, row.outside)),
                "fits" if row.fits else "no",
                str(row.largest_micro_batch or "-"),
                row.strategy.file,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = (0, len(heads) - 1)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def notes(config: Config, model: LanguageModel, fits: list[Fit]) -> list[str]:
    """What the table does not show: memory of the machine, and snapshots."""
    snapshot, keep = snapshot_bytes(model.layout(), config.optim.name) / 1e9, config.snapshot.keep
    return [
        *(
            f"{row.strategy.name} keeps {sum(row.kinds[kind] for kind in OFFLOADED) / GIB:.2f} GiB "
            "a process in the machine's memory."
            for row in fits
            if row.strategy.offload
        ),
        f"A snapshot is {snapshot:.2f} GB: {snapshot * (keep + 1):.1f} GB of disk with "
        f"snapshot.keep={keep} and one being written.",
    ]


def memory_of(options: argparse.Namespace) -> float:
    """GiB of each process: --memory, or the local GPU's. Raises ConfigError without either."""
    if options.memory is not None:
        return float(options.memory)
    if options.gpu is not None:
        return CARDS[options.gpu]
    if options.device == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / GIB
    raise ConfigError(
        "no GPU was found. Name one, such as --gpu h100, or give the memory of each process in "
        "GiB, such as --memory 24."
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    parser = argparse.ArgumentParser(
        description="Will it fit? The memory of each process under each strategy. Needs no GPU.",
        epilog="Exit codes: 0 it fits, 1 plan.py failed, 2 a mistake in the input, 3 nothing fits.",
    )
    if sentence := removed_option("plan.py", arguments):
        parser.error(sentence)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="as for train.py: model=gpt2_xl, ...")
    for name, counted in (
        ("processes", "GPUs, over all machines"),
        ("machines", "machines that the processes run on"),
        ("context", "processes that share each sequence: parallelism_config_cp_size"),
        ("tensor", "processes that share each matrix: parallelism_config_tp_size"),
    ):
        add(f"--{name}", type=POSITIVE_INT, default=1, metavar="N", help=f"{counted}; default: 1")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--gpu", choices=CARDS, help="the memory of a GPU by its name")
    memory.add_argument(
        "--memory",
        type=bounded(float, 0.01, 1e6),
        metavar="GIB",
        help="of each process; default: that of the local GPU",
    )
    add("--precision", choices=[*DTYPES], default="bf16")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add(
        "--vocab-size",
        type=POSITIVE_INT,
        help="default: that of data.tokenizer=bpe:<size>, else 256; GPT-2's is 50257",
    )
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
