"""The proof: which attempts are made, in which order, and what is said of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from config.schema import Config
from proving import costs, folders, shapes
from proving.attempts import Launch
from proving.ends import KILLED, resumed
from proving.lines import Line, failed, largest_difference, passed, unchecked, within
from proving.stores import stored
from proving.task import STEPS, Outcome, Task
from snapshot.disk.folder import folder_name, read_json, write_json
from snapshot.disk.model import CONFIG
from training.exits import EXIT_DONE

FEW = 2
"""Steps that are compared between shapes."""
LONG_SECONDS = 60.0
"""If one process takes longer for these, they are of fewer sequences."""
OTHER_PROCESSES = "resumed on one process"
SHAPES = ("shape", "split", "one", "other")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""transformers' names of their number, by family."""
RUNS = (
    "undisturbed",
    *SHAPES,
    "disturbed",
    "stored",
    "memory",
    "architecture",
)
"""Folders of the runs of attempts."""


@dataclass
class Proof:
    """Makes the attempts, and yields a line for each check."""

    launch: Launch
    config: Config
    """That of the real run."""
    first_row: list[list[Any]] = field(default_factory=list)
    """Of the training text: pieces, each with whether the model learns to write it."""
    machine: str = "an unknown machine"
    """What the first attempt has computed on."""

    def lines(self) -> Iterator[Line]:
        """All checks. They need no other one, unless it is an attempt that failed."""
        whole = self.launch.run(Task("undisturbed", "undisturbed", STEPS, describes_run=True))
        if whole.code != EXIT_DONE:
            yield failed("the first steps", whole)
            return
        self.first_row, self.machine = whole.facts["text"]["first_row"], whole.facts["machine"]
        yield from text(whole)
        is_new = self.config.model.pretrained is None
        yield from folders.contents(whole.snapshot(STEPS), is_new)
        yield folders.room(whole.snapshot(STEPS), self.config.snapshot.keep)
        yield from shapes.weights(whole)
        yield from self.any_shape(whole)
        self.remove(*SHAPES)
        yield from resumed(self.launch, self.config, whole, STEPS)
        self.remove("disturbed")
        yield from stored(self.launch, self.config, whole, STEPS)
        counted = self.launch.run(Task("memory", "memory", FEW, counts_memory=True))
        yield costs.memory(counted)
        yield from costs.speed(whole, self.config)

    def any_shape(self, whole: Outcome) -> Iterator[Line]:
        """One run, any shape."""
        changes, now = self.fewer_sequences(whole)
        kept = {**changes, "snapshot.keep": FEW + 1}
        here = self.launch.run(Task("shape", "shape", 2 * FEW, kept, in_float32=True))
        if here.code != EXIT_DONE:
            yield failed("the first steps in float32", here)
            return
        if whole.facts["precision"] != "no" and not changes:
            yield shapes.rounding(whole.facts["precision"], whole, here)
        yield from self.split(here, changes, now)
        if self.launch.processes > 1:
            yield from self.alone(here, changes, now)
        else:
            yield unchecked(OTHER_PROCESSES, "one process was launched")

    def fewer_sequences(self, whole: Outcome) -> tuple[dict[str, Any], str]:
        """Keys for a smaller global batch, if one process takes too long, and what to say of it."""
        parts, batch = whole.facts["parts"], self.config.train.global_batch_size
        few = 2 * parts
        if costs.seconds_a_step(whole) * parts * FEW <= LONG_SECONDS or few >= batch:
            return {}, ""
        changes = {"train.global_batch_size": few, "train.micro_batch_size": 1}
        return changes, f", with {few} sequences a step, not {batch}"

    def split(self, here: Outcome, changes: Mapping[str, Any], now: str) -> Iterator[Line]:
        """The same steps from micro-batches of another size."""
        name, size = "split otherwise", here.facts["micro_batch"]
        other = other_size(size, here.facts["accumulation"])
        if other is None:
            yield unchecked(f"loss, {name}", "a step has one sequence on each process")
            return
        changes = {**changes, "train.micro_batch_size": other}
        found = self.launch.run(Task("split", "split", FEW, changes, in_float32=True))
        if found.code == EXIT_DONE:
            words = f"micro-batches of {found.facts['micro_batch']}, not {size}{now}"
            yield from shapes.same_steps(name, here, found, words)
        else:
            yield failed(f"loss, {name}", found)
        self.remove("split")

    def alone(self, here: Outcome, changes: Mapping[str, Any], now: str) -> Iterator[Line]:
        """The same steps in one process, and the run continued by it."""
        name, processes = "one process", self.launch.processes
        task = Task("one", "one", FEW, changes, alone=True, in_float32=True)
        found = self.launch.run(task)
        if lacks_memory(found):
            yield from self.two_layers(found, changes, now)
            return
        if found.code != EXIT_DONE:
            yield failed(f"loss, {name}", found)
            return
        yield from shapes.same_steps(name, here, found, f"one process, not {processes}{now}")
        self.remove("one")
        target = self.launch.folder / "other" / here.snapshot(FEW).relative_to(here.folder)
        shutil.copytree(here.snapshot(FEW), target)
        task = Task("other", "other", 2 * FEW, changes, alone=True, in_float32=True)
        found = self.launch.run(task)
        if found.code == EXIT_DONE:
            difference = largest_difference(found.losses, here.losses)
            said = f"steps {FEW + 1} to {2 * FEW}, from the snapshot of {processes} processes{now}"
            yield within(OTHER_PROCESSES, difference, shapes.LOSS, said)
        else:
            yield failed(OTHER_PROCESSES, found)

    def two_layers(self, failure: Outcome, changes: Mapping[str, Any], now: str) -> Iterator[Line]:
        """The same steps of a model with two layers, where one process cannot hold more."""
        name = "one process"
        why = f"one process cannot hold the model: {failure.last_words()}"
        yield unchecked(OTHER_PROCESSES, why)
        fewer = self.fewer_layers()
        if fewer is None:
            yield unchecked(f"loss, {name}", why)
            return
        self.remove("shape", "one")
        changes = {**changes, **fewer}
        here = self.launch.run(Task("shape", "shape", FEW, changes, in_float32=True))
        found = self.launch.run(Task("one", "one", FEW, changes, alone=True, in_float32=True))
        for one in (here, found):
            if one.code != EXIT_DONE:
                yield failed(f"loss, {name}", one)
                return
        words = f"one process, of {FEW} layers, because it cannot hold all{now}"
        yield from shapes.same_steps(name, here, found, words)

    def fewer_layers(self) -> dict[str, Any] | None:
        """Keys for the same model with two layers; None for adapters, which are not a model."""
        if self.config.model.pretrained is None and self.config.model.architecture is None:
            return {"model.n_layer": FEW}
        snapshot = self.launch.folder / "undisturbed" / "snapshots" / folder_name(STEPS)
        if not (snapshot / CONFIG).exists():
            return None
        folder = self.launch.folder / "architecture"
        folder.mkdir(exist_ok=True)
        for file in snapshot.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, folder)
        write_json(folder / CONFIG, with_layers(read_json(folder / CONFIG), FEW))
        return {
            "model.pretrained": None,
            "model.architecture": str(folder),
            "data.tokenizer": str(folder),
        }

    def remove(self, *runs: str) -> None:
        """Remove what attempts have written, but for their logs."""
        for name in runs or RUNS:
            with suppress(OSError):
                shutil.rmtree(self.launch.folder / name)


def text(whole: Outcome) -> Iterator[Line]:
    """What is trained on."""
    facts = whole.facts["text"]
    found, looked_for = facts["held_out_found"], facts["held_out_looked_for"]
    said = f"{found} of {looked_for} held-out rows are in the training text"
    yield within("held-out text", found / max(1, looked_for), 0.5, said)
    wrong = facts["misplaced_targets"]
    yield passed("targets", wrong == 0, f"each is the token that follows; {wrong} are not")
    if facts["conversations"]:
        wrong = facts["unended_replies"]
        said = f"each reply is trained on to its end; {wrong} are not"
        yield passed("loss mask", wrong == 0, said)
    else:
        yield unchecked("loss mask", "it is a text: every token is a target")
    unknown, padding = facts["unknown_share"], facts["padding_share"]
    said = f"{unknown:.2%} unknown tokens; {padding:.1%} of the first rows are no targets"
    yield passed("tokens", facts["lost"] is None, facts["lost"] or said)


def lacks_memory(found: Outcome) -> bool:
    """Whether an attempt of one process has failed because it has not the memory of all."""
    if found.code == EXIT_DONE:
        return False
    return found.code == KILLED or "memory" in found.last_words()


def with_layers(content: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """A config.json of transformers, of a model with so many layers."""
    now = next(content[name] for name in LAYERS if name in content)
    cut = {name: one[:layers] if _has(one, now) else one for name, one in content.items()}
    return cut | {name: layers for name in LAYERS if name in content}


def _has(value: Any, entries: int) -> bool:
    return isinstance(value, list) and len(value) == entries


def other_size(micro_batch: int, accumulation: int) -> int | None:
    """Another size of micro-batches for the same step; None if there is none."""
    for size in range(micro_batch // 2, 0, -1):
        if micro_batch % size == 0:
            return size
    for times in range(2, accumulation + 1):
        if accumulation % times == 0:
            return micro_batch * times
    return None
