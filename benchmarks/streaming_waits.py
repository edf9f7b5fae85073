"""How long the steps of a run wait for a streamed data set of a loopback Hub.

    python benchmarks/streaming_waits.py KEY=VALUE ...

trains in this process, and prints the seconds from step 100 to the last, by phase, as JSON. `waits`
starts it in turns with a Hub that answers at once, and with one that takes 50 ms for each request.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import ROOT, median, print_table, spread
from streaming_texts import ROW_BYTES, made_up_rows, write_parquet

FIRST, LAST = 100, 800
"""Steps. The first window is read before any; by step 100 several have been read ahead."""
LATENCIES = 0.0, 0.05
REPO = "me/rows"
MEGABYTES = 4
GROUP_ROWS = 10
WORDS = (
    f"data.source={REPO}",
    "data.streaming=true",
    "data.tokenizer=bpe:257",
    "data.window_bytes=100000",
    "data.prefetch_bytes=400000",
    "data.stream_cache_bytes=2000000",
    "data.held_out_bytes=10000",
    f"train.max_steps={LAST}",
    "train.eval_every=1000000",
    "train.sample_every=0",
    "snapshot.every=1000000",
)


def main() -> None:
    """One run of train.py."""
    sys.path.insert(0, str(ROOT))
    import train
    from training.run.command import run_command

    reseed, run = train.reseed, train.main
    sessions: list[Any] = []
    before: dict[str, float] = {}

    def noted_reseed(seed: int, step: int, process: int) -> None:
        if step in (FIRST, LAST):
            seconds = sessions[0].report.clock.seconds
            took = {phase: value - before.get(phase, 0.0) for phase, value in seconds.items()}
            before.update(seconds)
            print("@ " + json.dumps(took), file=sys.stderr, flush=True)
        reseed(seed, step, process)

    def noted_main(config: Any, session: Any) -> int:
        sessions.append(session)
        return run(config, session)

    train.reseed = noted_reseed
    run_command(noted_main)


def serve(folder: Path, file: Path, latency: float) -> None:
    """A loopback Hub with the data set, until it is terminated."""
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "hub")]
    from loopback_hub import LoopbackHub

    with LoopbackHub(folder) as hub:
        hub.create(f"datasets/{REPO}")
        hub.commit_files(f"datasets/{REPO}", {file.name: file.read_bytes()})
        hub.latency = latency, latency
        print(json.dumps(hub.environment()), flush=True)
        threading.Event().wait()


@contextmanager
def hub_of(folder: Path, file: Path, latency: float) -> Iterator[dict[str, str]]:
    """The environment of a Hub, in another process, that waits so long for each request."""
    command = [sys.executable, __file__, "serve", str(folder), str(file), str(latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield {**os.environ, **json.loads(server.stdout.readline())}
        finally:
            server.terminate()


def share_of_wait(folder: Path, environment: dict[str, str]) -> float:
    """Of the time of the steps of a run, the part that they wait for data."""
    own = [f"run.dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
    result = subprocess.run(
        [sys.executable, __file__, *WORDS, *own],
        env={**environment, "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    lines = [line[2:] for line in result.stderr.splitlines() if line.startswith("@ ")]
    if result.returncode or len(lines) != 2:
        raise SystemExit(result.stderr[-2000:])
    seconds: dict[str, float] = json.loads(lines[-1])
    return seconds["data"] / sum(seconds.values())


def waits(turns: int) -> list[dict[str, Any]]:
    """A table of both Hubs."""
    shares: dict[float, list[float]] = {latency: [] for latency in LATENCIES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = folder / "train.parquet"
        write_parquet(file, list(made_up_rows(MEGABYTES * 10**6 // ROW_BYTES)), GROUP_ROWS)
        for turn in range(turns):
            for latency in LATENCIES if turn % 2 else LATENCIES[::-1]:
                place = folder / f"{latency}-{turn}"
                with hub_of(place / "hub", file, latency) as environment:
                    shares[latency].append(share_of_wait(place, environment))
                print(latency, shares[latency][-1], file=sys.stderr, flush=True)
    print_table(
        ["latency of a request, ms", "share of the steps that waits for data, %"],
        [(f"{1e3 * one:.0f}", spread([100 * s for s in of])) for one, of in shares.items()],
    )
    return [{"latency": one, "shares": of, "median": median(of)} for one, of in shares.items()]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
