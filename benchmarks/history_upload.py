"""Memory and an upload of a run of so many steps, in a process of its own.

`history.py` starts this file once for each length, with a loopback Hub as HF_ENDPOINT, so that the
memory of one length is not that of another. The first commits bring the repo up to date, with the
metrics of the whole run; measured is the next, EVERY steps later, as an upload of a long run is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from harness import ROOT
from history_run import Run

sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "hub")]
REPO, SECONDS = "me/run", 120.0


def measure(steps: int, shape: str) -> dict[str, float]:
    """Seconds of an upload, and resident memory, of a run of `steps` steps, in a new process."""
    from loopback_hub import LoopbackHub

    with tempfile.TemporaryDirectory() as place, LoopbackHub(Path(place), use_xet=False) as hub:
        result = subprocess.run(
            [sys.executable, __file__, str(steps), shape, place],
            env=os.environ | hub.environment(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> None:
    """The new process: snapshots and their uploads, the last of which is measured."""
    steps, shape, place = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    from store.attempt import Card, Policy, UploadTarget
    from store.hub import Hub
    from store.uploader import Uploader
    from training.run.records import records_for_upload

    run = Run(place, steps, shape)
    run.resume()
    policy = Policy(3, 0.0, private=True, takeover=False)
    hub, records = Hub(REPO, SECONDS), records_for_upload(run.config)
    hub.create(private=True)
    uploads = Uploader(UploadTarget(hub, policy, "run", "attempt", records=records))

    def upload() -> None:
        folder = run.report.last_snapshot
        assert folder is not None
        uploads.offer(folder, Card("# history\n", (run.dir / "curves.png").read_bytes()))
        assert uploads.flush(SECONDS), uploads.status().failure

    run.snapshot()
    begun, cpu = time.perf_counter(), time.process_time()
    upload()
    figures = {
        "upload": time.process_time() - cpu,
        "upload_wall": time.perf_counter() - begun,
        "resident": psutil.Process().memory_info().rss / 1e6,
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
