"""What earlier versions had and this one lacks, by the name that a user types.

The only place that knows. A key, a value of a key (`key=value`), or an option or a subcommand of a
program (`prove.py --faults`), each with what to do instead.
"""

from __future__ import annotations

from collections.abc import Sequence

REMOVED: dict[str, str] = {
    "data.documents=separate": "use masked, in which a document sees itself alone",
    "data.num_workers": "leave it out, because the training process reads its batches itself",
    "data.prefetch_bytes": "leave it out: four windows of each source are read ahead",
    "hub.bucket": "set hub.url=hf://buckets/<owner>/<name> instead",
    "hub.silence_seconds": "leave it out, because no attempt waits for another one",
    "hub.squash_every": "leave it out, because the contents of pruned snapshots are deleted",
    "hub.standby": "start the same command again by a scheduler; the newest start owns the run",
    "model.activation_checkpointing=offload": "use true; FSDP shards what is left",
    "model.activation_checkpointing=selective": "use true",
    "model.family": "name a model in model.architecture, or a preset such as model=llama_tiny",
    "model.n_kv_head": "name a config.json that has num_key_value_heads in model.architecture",
    "optim.state_dtype": "leave it out: it is float32. optim.name=muon needs half the memory",
    "run.adapt_threads": "leave it out; OMP_NUM_THREADS sets the number of threads",
    "run.attention": "leave it out: torch chooses the kernel",
    "run.compile_short_runs": "the accelerate config file decides; --dynamo_backend no",
    "run.emulate_bf16": "leave it out; a CPU without bf16 instructions uses float32",
    "run.interruptions_per_day": "give snapshot.every_minutes, the most that a lost machine costs",
    "run.max_cost": "run.max_minutes limits each attempt: divide the sum by the price of a minute",
    "run.measure_peak": "leave it out; metrics.jsonl has the share of NVIDIA's peak (mfu)",
    "run.metadata_address": "give python -m cloud.attempts --notice-address the address",
    "run.notice_seconds": "leave it out: a notice stops the run with a snapshot at once",
    "run.preemption_notice": "start the run with python -m cloud.attempts --notice auto",
    "run.price_per_hour": "multiply the price by the time left in the progress line",
    "run.reduce_dtype": "leave it out: processes add up gradients in float32",
    "run.residual_dtype": "blocks add up in float32. model.activation_checkpointing saves memory",
    "run.tf32": "set mixed_precision: bf16 in the accelerate config file, which is faster",
    "snapshot.every=auto": "give snapshot.every_minutes=10, or a number of steps",
    "snapshot.resume=never": "move run.dir away to start over, or give another run.name",
    "snapshot.staging_bytes": "leave it out: half of the free memory is used, if that suffices",
    "snapshot.whole": "leave it out. Adapters (model.lora_rank) have small snapshots",
    "plan.py --count": "plan one mesh at a time with --processes, --context and --tensor",
    "plan.py --context-strategy": "leave it out, because processes always exchange heads",
    "plan.py --json": "read the table, or call plan.planned of plan.py",
    "prove.py --faults": "leave it out; pytest tests/promises causes these faults",
    "python -m snapshot audit": "train again, and compare the sha256 in both manifest.json",
}


def removed(name: str, value: str = "") -> str | None:
    """The sentence for a key, or for a value of a key, that is gone; None for any other."""
    for gone in (f"{name}={value}", name):
        if gone in REMOVED:
            return f"{gone} was removed in 0.2.0: {REMOVED[gone]}."
    return None


def removed_option(program: str, arguments: Sequence[str]) -> str | None:
    """The sentence for an option or a subcommand of a program that is gone, if there is one."""
    names = (f"{program} {argument.partition('=')[0]}" for argument in arguments)
    return next((sentence for name in names if (sentence := removed(name))), None)
