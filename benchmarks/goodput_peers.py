"""The peers of goodput.py: transformers' Trainer, a loop with `save_state`, torchft."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import torch
from goodput_log import (
    BATCH,
    GONE_SECONDS,
    HEADS,
    LAYERS,
    RATE,
    SEED,
    WIDTH,
    Log,
    T,
    finish,
    world_size,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    """The blocks of the text of python-docs, in characters, as the peers read it."""

    def __init__(self) -> None:
        text = "".join(topics[name] for name in sorted(topics))
        letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
        self.vocabulary = len(letters)
        ids = torch.tensor([letters[letter] for letter in text])
        self._blocks = ids[: len(ids) // (T + 1) * (T + 1)].view(-1, T + 1)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self._blocks[row], "labels": self._blocks[row]}


def new_model(vocabulary: int) -> Any:
    """transformers' GPT-2 of this size; the same weights each time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": T + 1}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes, **dropout))


def light_model(vocabulary: int) -> nn.Module:
    """A model of the same size that needs no package but torch."""
    from model.gpt import GPT, GPTConfig

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = GPT(GPTConfig(vocabulary, T, LAYERS, HEADS, WIDTH))

        def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=self.gpt(input_ids[:, :-1], labels[:, 1:]))

    torch.manual_seed(SEED)
    return WithLoss()


def trainer(options: argparse.Namespace) -> None:
    """transformers' Trainer, which pushes each checkpoint, and resumes from the newest.

    Several machines resume from the Hub's, as only one of them has a checkpoint on its disk.
    """
    from huggingface_hub import HfApi, snapshot_download
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    world = world_size()
    log, rows = Log(options, world), Rows()
    output = options.disk / "trainer"

    class Logged(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            log.rows(inputs["input_ids"])
            log.pace()
            loss = super().compute_loss(model, inputs, *rest, **more)
            self.loss_of_step = float(loss[0] if isinstance(loss, tuple) else loss)
            return loss

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            log.begin()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            log.end(state.global_step, training.loss_of_step)

    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=options.steps,
        per_device_train_batch_size=BATCH // world,
        learning_rate=RATE,
        save_steps=options.every,
        save_total_limit=2,
        logging_steps=options.steps,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
        ddp_timeout=GONE_SECONDS,
        enable_jit_checkpoint=True,
        push_to_hub=True,
        hub_model_id="me/run",
        hub_strategy="checkpoint",
    )
    training = Logged(new_model(rows.vocabulary), arguments, train_dataset=rows)
    training.add_callback(Steps())
    found = [get_last_checkpoint(str(output))] if world == 1 and output.is_dir() else []
    if HfApi().repo_exists("me/run"):
        pattern = "last-checkpoint/*"
        here = snapshot_download("me/run", allow_patterns=pattern, local_dir=output / "hub")
        found.append(str(Path(here, "last-checkpoint")))
    newest = max(found, key=step_of, default=None)
    training.train(resume_from_checkpoint=newest if step_of(newest) >= 0 else None)
    if training.state.global_step >= options.steps:  # else it returns after a SIGTERM
        finish(options)


def step_of(folder: str | None) -> int:
    """The step of a Trainer's checkpoint; -1 for one that is not whole."""
    try:
        return int(json.loads(Path(str(folder), "trainer_state.json").read_text())["global_step"])
    except (OSError, ValueError, KeyError):
        return -1


def bare(options: argparse.Namespace) -> None:
    """A loop with accelerate's `save_state` on a disk that all machines share and none loses.

    For `light`, its model is not of transformers.
    """
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs

    kept = options.folder / "bare"
    kept.mkdir(exist_ok=True)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=GONE_SECONDS))],
    )
    log, rows = Log(options, accelerator.num_processes), Rows()
    model = (light_model if options.name == "light" else new_model)(rows.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    loader = DataLoader(rows, BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    for folder in sorted(kept.glob("step-*"), reverse=True):
        try:
            accelerator.load_state(str(folder))
            step = int(folder.name.removeprefix("step-"))
            break
        except Exception as error:  # cut short by a kill: the one before
            print(f"{folder}: {error}", flush=True)
    accelerator.wait_for_everyone()
    epoch, done = divmod(step, len(loader))
    while step < options.steps:
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, done) if done else loader:
            log.begin()
            log.rows(batch["input_ids"])
            log.pace()
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            log.end(step, loss.item())
            if step % options.every == 0:
                accelerator.save_state(str(kept / f"step-{step:06}"))
                if accelerator.is_main_process:
                    for old in sorted(kept.glob("step-*"))[:-2]:
                        shutil.rmtree(old, ignore_errors=True)
            if step == options.steps:
                break
        epoch, done = epoch + 1, 0
    finish(options)


def torchft(options: argparse.Namespace) -> None:
    """Each machine is a replica group of torchft; one that joins gets the state of another."""
    ft = import_module("torchft")  # measured if installed, never required
    log, rows = Log(options, options.machines), Rows()
    kept = options.disk / "torchft.pt"
    model = new_model(rows.vocabulary)
    inner = torch.optim.AdamW(model.parameters(), RATE)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    store = torch.distributed.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=GONE_SECONDS)
    address = os.uname().nodename
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=limit,
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=limit,
        replica_id=str(options.machine),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        hostname=address,
        lighthouse_addr=options.lighthouse,
    )
    if kept.exists():
        there = torch.load(kept)
        load(there["all"])
        manager.load_state_dict(there["manager"])
    wrapped, optimizer = ft.DistributedDataParallel(manager, model), ft.Optimizer(manager, inner)
    place = {"group_rank": 0, "num_replicas": 1, "seed": SEED}
    sampler = ft.DistributedSampler(rows, options.machine, options.machines, **place)
    loader = DataLoader(rows, BATCH // options.machines, sampler=sampler, drop_last=True)
    sampler.set_epoch(manager.current_step())
    batches = iter(loader)
    while manager.current_step() < options.steps:
        log.begin()
        batch = next(batches)
        log.rows(batch["input_ids"])
        optimizer.zero_grad()
        log.pace()
        loss = wrapped(**batch).loss
        loss.backward()
        before = manager.current_step()
        optimizer.step()
        step = manager.current_step()
        if step > before:
            log.end(step, loss.item())
        if step % options.every == 0:
            torch.save({"all": state(), "manager": manager.state_dict()}, f"{kept}.new")
            Path(f"{kept}.new").replace(kept)
    finish(options)


PEERS = {"trainer": trainer, "bare": bare, "light": bare, "torchft": torchft}
"""By the names of the command line."""
