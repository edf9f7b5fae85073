"""python -m snapshot audit A B: is B what the recipe of its run gives, trained again from A?

accelerate launch --config_file FILE -m snapshot audit A B    on several processes
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import safe_open

from config.schema import Config, DataConfig
from config.stored import with_folders
from proving.attempts import Launch
from proving.command import in_columns, leave
from proving.lines import RED, Line, failed, largest_difference, passed, unchecked, within
from proving.proof import other_size
from proving.session import NEVER, as_attempt
from proving.task import Outcome, Task
from snapshot.command_line import exit_code_of
from snapshot.disk.checking import check_snapshot
from snapshot.disk.files import manifest_entries, snapshots_in
from snapshot.disk.state import RunState, read_state
from snapshot.errors import SnapshotError
from snapshot.run_store import checked, fetch_newest
from snapshot.start import METRICS
from store.fetch import fetch
from store.kinds import named_store
from training.distributed.environment import is_main_process
from training.exits import EXIT_DONE, EXIT_FAILED
from training.reporting.metrics import read_metrics

TIMES_ROUNDING = 10.0
"""How much more than another split of the steps another machine may change."""
ROUNDED = 1e-7
"""A float32 number has no smaller differences, relative to it."""


def audit(arguments: Sequence[str]) -> NoReturn:
    """Train again from one snapshot to another, and compare; the exit code is 1 if it differs."""
    options = parse(arguments)
    leave(exit_code_of(lambda: _audit(options)))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(prog="python -m snapshot audit", description=__doc__)
    for name, said in (("a", "where to begin"), ("b", "what to compare with, of a later step")):
        parser.add_argument(
            name, metavar=name.upper(), help=f"a snapshot's folder, or owner/name@revision: {said}"
        )
    parser.add_argument(
        "words", nargs="*", metavar="KEY=VALUE", help="keys that differ here, such as data.source"
    )
    return parser.parse_args(list(arguments))


def _audit(options: argparse.Namespace) -> int:
    from train import main  # the loop that trained it

    with TemporaryDirectory(prefix="audit-") as place, ExitStack() as stack:
        folder = Path(place)
        first, second = _found(options.a, folder / "a"), _found(options.b, folder / "b")
        states = _states(first, second)
        load = partial(load_audited, _recipe(states[1], second, options.words))
        launch = Launch(main, [], folder, load)
        if not is_main_process():
            launch.follow()
            return EXIT_DONE
        stack.callback(launch.end)
        print(_header(*states), flush=True)
        lines = []
        for line in _lines(launch, first, second, states[1]):
            lines.append(line)
            print(in_columns(line), flush=True)
    return EXIT_FAILED if any(line.status == RED for line in lines) else EXIT_DONE


def _found(name: str, folder: Path) -> Path:
    """The whole snapshot that a name means, downloaded to `folder` if it is on the Hub."""
    if (remote := named_store(name)) is not None:
        folder.mkdir()
        return fetch_newest(*remote, folder, checked(fetch)).path
    path = Path(name)
    if not path.is_dir():
        raise SnapshotError(f"{name} is neither a folder nor the name of a repo. Check it.")
    check_snapshot(path)
    return path.resolve()


def _states(first: Path, second: Path) -> tuple[RunState, RunState]:
    one, other = read_state(first), read_state(second)
    if one.run_id != other.run_id:
        raise SnapshotError(
            f"{first} is of run {one.run_id[:8]}, {second} of run {other.run_id[:8]}. Name two "
            "snapshots of one run."
        )
    if one.step >= other.step:
        raise SnapshotError(
            f"{first} is of step {one.step}, {second} of step {other.step}. Name the earlier one "
            "first."
        )
    return one, other


def _recipe(state: RunState, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """The configuration of a snapshot, with the keys that differ here."""
    stored = with_folders(state.config, folder.parents[1] / "config.yaml", every=True)
    if stored["data"]["cache_dir"] == state.config["data"]["cache_dir"]:  # without its folder
        stored["data"] = {**stored["data"], "cache_dir": DataConfig.cache_dir}
    try:
        changed = OmegaConf.merge(stored, OmegaConf.from_dotlist(list(words)))
        OmegaConf.merge(OmegaConf.structured(Config), changed)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise SnapshotError(f"the configuration cannot be used: {reason}.") from error
    plain = OmegaConf.to_container(changed)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def load_audited(plain: dict[str, Any], task: Task, folder: Path, _: list[str]) -> Config:
    """The configuration of an attempt of an audit: that of the snapshot, as in a proof."""
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    assert isinstance(config, Config)
    return as_attempt(config, task, folder)


def _header(first: RunState, second: RunState) -> str:
    steps = second.step - first.step
    return (
        f"audit     {steps:,} steps of run {second.run_id[:8]}, from step {first.step:,} to "
        f"{second.step:,}\ntrained   on {second.computed_on}\n"
    )


def _lines(launch: Launch, first: Path, second: Path, state: RunState) -> Iterator[Line]:
    changes = {"snapshot.resume": str(first), "snapshot.every": NEVER}
    again = launch.run(Task("again", "again", state.step, changes))
    if again.code != EXIT_DONE:
        yield failed("trained again", again)
        return
    here = again.facts["machine"]
    same_kind = here == state.computed_on
    yield passed("trained again", True, f"on {here}")
    ours = again.snapshot(state.step)
    if _digests(ours) == _digests(second):
        yield passed("same bits", True, "weights and optimizer state of B are what A leads to")
        return
    far, name = distance(first, second, ours)
    said = "the weights differ by this much of the way from A to B"
    if same_kind:
        said += ", on the same kind of machine: the bits should be the same"
        yield within("same bits", far, 0.0, f"{said}; most {name}")
        return
    size, times = again.facts["micro_batch"], again.facts["accumulation"]
    if (other := other_size(size, times)) is None:
        yield unchecked("rounding", f"no other split to compare with: {far:.1e} of the way; {said}")
        return
    task = Task("split", "split", state.step, {**changes, "train.micro_batch_size": other})
    split = launch.run(task)
    if split.code != EXIT_DONE:
        yield failed("split otherwise", split)
        return
    yield _losses(again, split, second)
    rounding, _ = distance(first, ours, split.snapshot(state.step))
    said += f"; with micro-batches of {other}, not {size}, they do by {rounding:.1e}; most {name}"
    yield within("as rounding explains", far, TIMES_ROUNDING * rounding, said)


def _losses(again: Outcome, split: Outcome, second: Path) -> Line:
    """The losses beside those that the run has recorded, where its directory is here."""
    metrics = second.parents[1] / METRICS
    if second.parent != snapshots_in(second.parents[1]) or not metrics.exists():
        return unchecked("losses", "the metrics of the run are not beside B")
    recorded = {
        one["step"]: one["loss"] for one in read_metrics(metrics) if one["event"] == "train"
    }
    rounding = max(largest_difference(again.losses, split.losses), ROUNDED)
    steps = len(again.losses.keys() & recorded.keys())
    said = f"of {steps} steps; split otherwise, they differ by {rounding:.1e}"
    found = largest_difference(again.losses, recorded)
    return within("losses", found, TIMES_ROUNDING * rounding, said)


def _digests(folder: Path) -> dict[str, tuple[int, str]]:
    entries = manifest_entries(folder)
    return {name: one for name, one in entries.items() if name.endswith(".safetensors")}


def distance(start: Path, one: Path, other: Path) -> tuple[float, str]:
    """How far two snapshots are from each other, relative to the way of `one` from `start`.

    And the tensor of which the most of that is. Read tensor by tensor.
    """
    apart = way = worst = 0.0
    name_of_worst = ""
    with ExitStack() as stack:
        begin, left, right = (_weights(folder, stack) for folder in (start, one, other))
        for name, read in left.items():
            here = read().double()
            own = float((right[name]().double() - here).norm()) ** 2
            apart, way = apart + own, way + float((here - begin[name]().double()).norm()) ** 2
            if own > worst:
                worst, name_of_worst = own, name
    return math.sqrt(apart / way) if way else float("inf"), name_of_worst


def _weights(folder: Path, stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """By name, what reads a weight of a snapshot."""
    found: dict[str, Callable[[], Any]] = {}
    for name in sorted(_digests(folder)):
        if not name.startswith("optimizer"):
            file = stack.enter_context(safe_open(folder / name, "pt"))
            found |= {key: partial(file.get_tensor, key) for key in file.keys()}  # noqa: SIM118
    return found
