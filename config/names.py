"""The answer to a name that is no key: where its setting belongs, and the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

ALIASES = {
    "optim.learning_rate": "lr",
    "optim.name": "optimizer",
    "optim.schedule": "lr_scheduler_type",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.max_grad_norm": "grad_clip clip gradient_clipping",
    "train.max_steps": "iters max_iters epochs num_epochs num_train_epochs",
    "train.global_batch_size": "batch batch_size train_batch_size",
    "train.micro_batch_size": "gradient_accumulation_steps",
    "train.log_every": "log_interval logging_steps",
    "snapshot.every": "save_every save_steps checkpoint_every",
    "snapshot.keep": "save_total_limit",
    "snapshot.resume": "init_from resume_from_checkpoint checkpoint ckpt",
    "run.dir": "output output_dir out save_dir",
    "run.tracker": "wandb tensorboard report_to wandb_log",
    "hub.repo_id": "push_to_hub",
    "data.source": "data dataset_name data_path data_dir text file train_file",
    "data.block_size": "context context_length seq_len seq_length max_seq_length max_length",
    "model.n_layer": "depth",
    "model.n_embd": "hidden_size d_model dim width embed_dim",
}
"""Names of a key in nanoGPT, transformers and the like that are not similar to it."""
OF_LAUNCHER = (
    "num_processes num_machines mixed_precision precision dtype bf16 fp16 device gpus cpu use_cpu"
    " multi_gpu use_fsdp fsdp ddp nproc_per_node world_size config_file compile"
)
"""Settings of the accelerate config file, in its words and others."""


def advice(name: str, keys: Sequence[str]) -> str:
    """A sentence with what to write instead of a name: a key, or an option of the launcher."""
    name = name.lstrip("-").replace("-", "_")
    last = name.rpartition(".")[2]
    if last in OF_LAUNCHER.split():
        where = "options of `accelerate launch`, before train.py, or entries of its config file"
        return f"Processes, machines, precision and compilation belong to the launcher: {where}."
    ends = {key.rpartition(".")[2]: key for key in keys}
    exact = [ends[last]] if last in ends else []
    exact += [key for key, aliases in ALIASES.items() if last in aliases.split()]
    similar = difflib.get_close_matches(name, keys, 1)
    similar += [ends[end] for end in difflib.get_close_matches(last, ends, 1)]
    near = [name] * (name in keys) + exact + similar
    return "".join(f"The nearest key is {key}. " for key in near[:1]) + "All keys: --help."
