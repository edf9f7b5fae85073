"""train.py until its weights have their first values, whose hashes the main process prints.

python tests/support/first_weights.py key=value ...
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from model.sharded import gather_full
from training.distributed.accelerator import unwrapped
from training.run import command, session


def main(config, attempt) -> int:
    fill = session.fill_weights

    def fill_and_end(accelerator, pretrained, start, model, optimizer, seed):
        fill(accelerator, pretrained, start, model, optimizer, seed)
        bare = unwrapped(accelerator, model)
        hashes = {
            name: hashlib.sha256(gather_full(one).contiguous().numpy().tobytes()).hexdigest()
            for name, one in bare.named_parameters()
        }
        if accelerator.is_main_process:
            print("weights:", json.dumps(hashes), flush=True)
        accelerator.wait_for_everyone()
        sys.exit(0)

    session.fill_weights = fill_and_end
    return train.main(config, attempt)


if __name__ == "__main__":
    command.run_command(main)
