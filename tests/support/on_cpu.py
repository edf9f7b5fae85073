"""A program of this project on a CPU with or without bf16 instructions, whatever this one has.

python tests/support/on_cpu.py with|without train.py key=value ...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    _, kind, program, *words = sys.argv
    torch.cpu.get_capabilities = lambda: {"avx512_bf16": kind == "with"}
    sys.path.insert(0, str(ROOT))
    sys.argv = [program, *words]
    runpy.run_path(str(ROOT / program), run_name="__main__")
