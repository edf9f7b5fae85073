# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0",
#     "accelerate>=1.15,<2",
#     "datasets>=5.2,<6",
#     "filelock>=3.30",
#     "fsspec>=2025.3",
#     "hf-xet>=1.6,<2; platform_machine in 'x86_64 amd64 AMD64 arm64 ARM64 aarch64'",
#     "httpx2>=2.0,<3",
#     "huggingface_hub>=2.4,<3",
#     "hydra-core>=1.3.2,<1.4",
#     "matplotlib>=3.10.7,<4",
#     "numpy>=2.0,<3",
#     "omegaconf>=2.3,<2.4",
#     "psutil>=6,<8",
#     "pyarrow>=21",
#     "safetensors>=0.8,<0.9",
#     "tokenizers>=0.23,<0.24",
#     "tqdm>=4.66,<5",
# ]
# ///
"""A run as a Hugging Face Job, which only needs the repo that it writes to.

    git archive --output code.tar.gz HEAD
    hf jobs uv run --flavor a10g-small --timeout 12h --attempts 10 --secrets HF_TOKEN \\
        cloud/hf_job.py code.tar.gz --restarts 20 \\
        --config_file accelerate_configs/single_gpu.yaml train.py hub.repo_id=me/run

What follows the archive is for `cloud.attempts`. The client sends both files along. The
dependencies are those of requirements.txt.
"""

from __future__ import annotations

import os
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
    os.execv(sys.executable, [sys.executable, "-m", "cloud.attempts", *words])


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["code.tar.gz"]))
