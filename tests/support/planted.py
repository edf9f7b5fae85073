"""Faults that are planted in a copy of this project, one line each, and the check that finds them.

Each is a mistake that trains on without an error, or that nobody sees before it costs a run.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import chats
from runs import ROOT

SESSION, LOOP = "training/run/session.py", "train.py"
DROPOUT = ("model.dropout=0.1",)
CHAT, STORE = "conversations", "store"
"""A set-up beside the small text: conversations and their model, or a store."""


CONVERSATIONS = [
    chats.said(f"how is run {i}?", f"run {i} " + "goes on, " * (i % 5) + "as planned.")
    for i in range(40)
]


class Fault(NamedTuple):
    """A line of a file, what it becomes, and the checks of which one turns red."""

    name: str
    file: str
    line: str
    becomes: str
    found_by: tuple[str, ...]
    words: tuple[str, ...] = ()
    launch: str | None = None
    """An accelerate config file of two processes; None for one process."""
    setting: str | None = None


SPLIT = ("loss, split otherwise", "gradient norm, split otherwise")
ONE = ("loss, one process", "gradient norm, one process")
SAME = ("same losses after all of that", "same bits after all of that")
DDP, FSDP = "ddp_cpu.yaml", "fsdp_cpu.yaml"

FAULTS = [
    Fault("accumulate left out", LOOP, "with accelerator.accumulate(model):", "if True:", SPLIT),
    Fault(
        "loss not divided by the accumulation",
        LOOP,
        "accelerator.backward(loss)",
        "accelerator.backward(loss * accumulation)",
        SPLIT,
    ),
    Fault(
        "micro-batches weighed alike",
        LOOP,
        "loss = model(*batch) * weight",
        "loss = model(*batch)",
        SPLIT,
        setting=CHAT,
    ),
    Fault("gradients kept after an update", LOOP, "optimizer.zero_grad(set_to_none)", "pass", SAME),
    Fault(
        "sampler that ignores the rank",
        LOOP,
        "    model, optimizer, train_loader, held_out_loader = accelerator.prepare(\n"
        "        model, optimizer, train_loader, held_out_loader\n    )",
        "    model, optimizer, held_out_loader = accelerator.prepare(\n"
        "        model, optimizer, held_out_loader\n    )",
        ("share of a batch",),  # each process computes all: the same losses, at their price
        launch=DDP,
    ),
    Fault(
        "order that depends on the number of processes",
        LOOP,
        "windows.order(train.seed,",
        "windows.order(train.seed + accelerator.num_processes,",
        ONE,
        launch=DDP,
    ),
    Fault(
        "gradients not averaged over processes",
        LOOP,
        "with accelerator.accumulate(model):",
        "with accelerator.no_sync(model):",
        ("the first steps in float32", *SPLIT, *ONE),
        launch=DDP,
    ),
    Fault("dropout not reseeded", LOOP, "reseed(train.seed, step, process)", "pass", SAME, DROPOUT),
    Fault(
        "data that begins anew after a resume",
        LOOP,
        "StepBatches(order, split, session.next_step)",
        "StepBatches(order, split, 1)",
        SAME,
    ),
    Fault(
        "wrong learning rate after a resume",
        LOOP,
        "learning_rate_at(step, optim,",
        "learning_rate_at(step + (session.start.state is not None), optim,",
        SAME,
    ),
    Fault(
        "optimizer state not restored",
        "snapshot/disk/load.py",
        "for part in parts_of_moments(layout, state):",
        "for part in ():",
        ("killed in a snapshot", "time limit", "resumed", *SAME),
    ),
    Fault(
        "a snapshot that lacks one moment",
        "snapshot/disk/tensors.py",
        "for key, value in sorted(state[trained[names[0]]].items()):",
        "for key, value in sorted(state[trained[names[0]]].items())[1:]:",
        ("killed in a step", "killed in a snapshot", "snapshot is whole", "the first steps"),
    ),
    Fault(
        "untied weights",
        "model/gpt.py",
        "self.lm_head.weight = self.transformer.wte.weight",
        "self.lm_head.weight = torch.nn.Parameter(self.transformer.wte.weight.detach())",
        ("the first steps", *SAME),
    ),
    Fault(
        "attention that sees what follows",
        "model/gpt.py",
        "rows, dropout, is_causal=time > 1)",
        "rows, dropout, is_causal=False)",
        ("loads in transformers",),
    ),
    Fault(
        "another activation than config.json says",
        "model/gpt.py",
        "self.approximate = ACTIVATIONS[config.activation_function]",
        'self.approximate = "tanh"',
        ("loads in transformers",),
    ),
    Fault(
        "a pickle in the snapshot",
        "training/run/writer.py",
        "self._tokenizer.save(folder)",
        'self._tokenizer.save(folder); torch.save({}, folder / "more.pt")',
        ("no code in it", "snapshot is whole"),
    ),
    Fault(
        "the final name first, then the files",
        "snapshot/disk/folder.py",
        "building, final = root / temporary_name(name), root / name",
        "building = final = root / name",
        ("the first steps", "killed in a snapshot", "SIGTERM", *SAME),
    ),
    Fault(
        "no signal handler",
        "training/run/stopping.py",
        "        for number in SIGNALS:\n            if number != signal.SIGHUP",
        "        for number in ():\n            if number != signal.SIGHUP",
        ("SIGTERM",),
    ),
    Fault(
        "a time limit that nobody reads",
        "training/run/stopping.py",
        "if not cause and now + 2 * pace * self._every > self._ends:",
        "if False:",
        ("time limit",),
    ),
    Fault(
        "held-out rows in the training text",
        "data/corpus.py",
        "bounds = ((0, info.split), (info.split, len(file)))",
        "bounds = ((0, len(file)), (info.split, len(file)))",
        ("held-out text",),
    ),
    Fault(
        "targets that are the inputs",
        "data/loader.py",
        "targets[:length] = tokens[:-1], tokens[1:]",
        "targets[:length] = tokens[:-1], tokens[:-1]",
        ("targets",),
    ),
    Fault(
        "a loss mask that is shifted by one",
        "data/loader.py",
        "self.documents.are_targets(start + 1, length)",
        "self.documents.are_targets(start, length)",
        ("loss mask", "targets"),
        setting=CHAT,
    ),
    Fault(
        "an upload that nobody awaits",
        "training/run/records.py",
        "    if uploads is None or store is None:\n        return\n    name = store",
        "    if True:\n        return\n    name = store",
        ("upload", "store"),
        setting=STORE,
    ),
    Fault(
        "a store's manifest first",
        "store/files.py",
        "        sent = {path: self._send(path, one) for path, one in contents.items()}\n",
        "        for path in [path for path in add if path.endswith(MANIFEST)]:\n"
        "            self._send(path, add[path])\n"
        "        self._refuse_moved(head, {})\n"
        "        sent = {path: self._send(path, one) for path, one in contents.items()}\n",
        ("upload", "killed in an upload", "store"),
        setting=STORE,
    ),
    Fault(
        "a resume that never asks the store",
        "training/run/start.py",
        "None if store is None else replace(store, for_all=lock.own_disks),",
        "None,",
        ("resumed from the store",),
        setting=STORE,
    ),
]


def with_fault(fault: Fault) -> str:
    """The content of the file with the fault in it. Fails where the line has changed."""
    content = (ROOT / fault.file).read_text(encoding="utf-8")
    assert content.count(fault.line) == 1, f"{fault.name}: the line of {fault.file} has changed"
    return content.replace(fault.line, fault.becomes)


def copy_with(fault: Fault, folder: Path) -> Path:
    """A copy of this project with a fault in it."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in files.stdout.split("\n"):
        if name and not name.startswith(("tests/", "docs/", "benchmarks/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / fault.file).write_text(with_fault(fault), encoding="utf-8")
    return folder
