"""What does a step do? Three steps of train.py are profiled: <run.dir>-trace/trace.json.

accelerate launch --config_file accelerate_configs/ddp_cpu.yaml trace.py [arguments of train.py]
"""

from __future__ import annotations

from tracing.session import TracedSession, load_traced_config
from train import main
from training.run.command import run_command

if __name__ == "__main__":
    run_command(main, load_traced_config, TracedSession, f"{__doc__}\n")
