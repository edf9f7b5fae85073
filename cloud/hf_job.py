# /// script
# requires-python = ">=3.11,<3.15"
# ///
"""A run as a Hugging Face Job, which only needs the repo that it writes to.

    git archive --output code.tar.gz HEAD
    hf jobs uv run --flavor a10g-small --timeout 12h --attempts 10 --secrets HF_TOKEN \\
        cloud/hf_job.py code.tar.gz --restarts 20 \\
        --config_file accelerate_configs/single_gpu.yaml train.py hub.repo_id=me/run

What follows the archive is for `cloud.attempts`. The client sends both files along. uv, which
starts this script, installs the versions of the archive's uv.lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path


def main(archive: str, *words: str) -> None:
    """Unpack the code and replace this process by `cloud.attempts` with these words."""
    if not Path(archive).is_file():
        print(f"{archive}: no such file. Make it: git archive --output code.tar.gz HEAD")
        sys.exit(2)
    folder = tempfile.mkdtemp(prefix="code-")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    os.chdir(folder)
    subprocess.run(["uv", "sync", "--quiet", "--locked", "--group", "models"], check=True)
    python = f"{folder}/.venv/bin/python"  # by its whole name it finds what is installed there
    os.execv(python, [python, "-m", "cloud.attempts", *words])


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["code.tar.gz"]))
