"""train.py on a CPU without bf16 instructions, whatever this one has.

python tests/support/without_bf16.py key=value ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from training.run.command import run_command

if __name__ == "__main__":
    torch.cpu.get_capabilities = dict
    run_command(train.main)
