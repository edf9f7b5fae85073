"""Does this set-up keep the promises? A few minutes of the real run, before it costs money.

accelerate launch --config_file accelerate_configs/ddp_cpu.yaml prove.py [arguments of train.py]
"""

from __future__ import annotations

from proving.command import prove
from train import main

if __name__ == "__main__":
    prove(main)
