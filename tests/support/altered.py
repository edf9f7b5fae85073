"""train.py with one thing altered, which its first argument names.

python tests/support/altered.py ALTERATION key=value ...

    aborts       the process of rank 0 aborts at step 5 in a thread of C, as NCCL's watchdog does
    fails        the process of rank 1 fails at step 5, alone
    evaluates-N  killed in the evaluation after step N, when its snapshot has been written
    undescribed  our GPT has a parameter that its config.json does not tell of
    groups       the main process prints the process groups in which it has called a collective
    weights      the main process prints the hashes of the first weights; then all end
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import time
from ctypes import byref, c_void_p, cast
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

import train
from model.gpt import GPT
from model.sharded import gather_full
from training.distributed.accelerator import unwrapped
from training.distributed.launcher import is_main_process
from training.distributed.processes import OF_THREADS
from training.reporting.report import Report
from training.run import command, session
from training.run.session import Session


class Altered(Session):
    def steps(self):
        for step in super().steps():
            if step == 5 and name == "aborts" and os.environ["RANK"] == "0":
                abort_in_a_thread()
            if step == 5 and name == "fails" and os.environ["RANK"] == "1":
                raise ValueError("only rank 1 knows why")
            yield step

    def end(self) -> int:
        if name == "groups" and is_main_process():
            from torch.distributed import distributed_c10d as c10d

            used = [one for one in c10d._world.pg_map if one._get_sequence_number_for_group() > 0]
            names = {one.group_desc for one in used} - {OF_THREADS}  # which is on the CPU
            print("groups", *sorted(names), flush=True)
        return super().end()


def abort_in_a_thread() -> None:
    process = ctypes.CDLL(None)
    process.pthread_create(byref(ctypes.c_ulong()), None, cast(process.abort, c_void_p), None)
    time.sleep(600)  # as a process that waits for the lost one


def kill_in_evaluation(attempt: Session, last: int) -> None:
    evaluate, stepped, at = train.held_out_loss, Report.add, [0]

    def add(report, step, *figures):
        at[0] = step
        stepped(report, step, *figures)

    def evaluate_or_die(*arguments):
        if at[0] == last:
            attempt.finish_writing()
            os._exit(9)
        return evaluate(*arguments)

    Report.add, train.held_out_loss = add, evaluate_or_die


def end_after_the_first_weights() -> None:
    fill = session.fill_weights

    def fill_and_end(accelerator, pretrained, start, model, optimizer, seed):
        fill(accelerator, pretrained, start, model, optimizer, seed)
        layout = unwrapped(accelerator, model).layout()
        parameters = layout.parameters()
        hashes = {}
        for file, names in layout.by_file_name(parameters).items():  # query, key, value may be 3
            whole = torch.cat([gather_full(parameters[name]) for name in names])
            hashes[file] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
        if accelerator.is_main_process:
            print("weights:", json.dumps(hashes), flush=True)
        accelerator.wait_for_everyone()
        sys.exit(0)

    session.fill_weights = fill_and_end


def add_parameter() -> None:
    build = GPT.__init__

    def build_and_add(model, config):
        build(model, config)
        model.extra = torch.nn.Parameter(torch.ones(()))

    GPT.__init__ = build_and_add


def main(config, attempt) -> int:
    if name == "undescribed":
        add_parameter()
    if name == "evaluates":
        kill_in_evaluation(attempt, int(value))
    if name == "weights":
        end_after_the_first_weights()
    return train.main(config, attempt)


if __name__ == "__main__":
    name, _, value = sys.argv.pop(1).partition("-")
    command.run_command(main, session_of=Altered)
