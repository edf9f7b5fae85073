"""How gradients are reduced: DDP's buckets, what is refused, and what FSDP sends when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from config.schema import Config, ConfigError, RunConfig
from training.distributed import accelerator as accelerators
from training.distributed.accelerator import check_configuration, ddp_options

MIB = 2**20


def model_of(size: int) -> torch.nn.Module:
    """A model whose gradients have so many bytes; a frozen parameter has none."""
    model = torch.nn.Module()
    model.trained = torch.nn.Parameter(torch.empty(size // 4, device="meta"))
    model.frozen = torch.nn.Parameter(torch.empty(MIB, device="meta"), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("size", "between_machines", "bucket"),
    [
        (400 * MIB, False, None),
        (100 * MIB, True, None),
        (400 * MIB, True, 50),  # an eighth
        (9000 * MIB, True, 250),
    ],
)
def test_buckets_grow_with_the_model_between_machines(size, between_machines, bucket):
    assert ddp_options(model_of(size), "float32", between_machines).bucket_mib == bucket


def test_ddp_is_called_with_torchs_own_options_alone():
    assert ddp_options(model_of(400 * MIB), "bf16", True).to_kwargs() == {
        "bucket_cap_mb": 50,
        "gradient_as_bucket_view": True,
        "forward_sync_buffers": False,
    }


@pytest.mark.parametrize(("dtype", "hooks"), [("float32", 0), ("bf16", 1)])
def test_a_hook_of_ddp_reduces_in_bf16_if_asked(dtype, hooks):
    found = []
    model = SimpleNamespace(register_comm_hook=lambda *one: found.append(one))
    ddp_options(model_of(4), dtype, False).register_comm_hook(model)
    assert len(found) == hooks


def an_accelerator(precision="bf16", fsdp=True, replicas=1, offload=False):
    plugin = SimpleNamespace(cpu_offload=SimpleNamespace(pin_memory=True) if offload else None)
    return SimpleNamespace(
        num_processes=1,
        distributed_type=DistributedType.FSDP,
        mixed_precision=precision,
        is_fsdp2=fsdp,
        state=SimpleNamespace(fsdp_plugin=plugin),
        parallelism_config=SimpleNamespace(dp_replicate_size=replicas, cp_size=1, tp_size=1),
    )


REFUSED = [
    ({"precision": "fp16"}, {"reduce_dtype": "bf16"}, 12, "run.reduce_dtype=bf16 cannot"),
    ({"replicas": 2}, {"reduce_dtype": "bf16"}, 4, "add up the 3 micro-batches of a step in 16"),
    ({}, {"reduce_dtype": "bf16", "sync_each_micro_batch": False}, 4, "or run.sync_each_micro"),
    ({"offload": True}, {"sync_each_micro_batch": False}, 4, "fsdp_offload_params: true"),
]
TAKEN = [
    ({}, {"reduce_dtype": "bf16"}, 4),
    ({"replicas": 2}, {"reduce_dtype": "bf16"}, 12),  # nothing is accumulated
    ({"replicas": 2}, {"sync_each_micro_batch": False}, 4),
    ({"fsdp": False}, {"reduce_dtype": "bf16", "sync_each_micro_batch": False}, 4),
]


def settle(one, run, micro) -> None:
    config = Config(run=RunConfig(**run))
    config.train.micro_batch_size = micro  # of 12 sequences a step
    check_configuration(an_accelerator(**one), config)


@pytest.mark.parametrize(("one", "run", "micro", "sentence"), REFUSED)
def test_sums_that_would_lose_digits_or_memory_are_refused(one, run, micro, sentence):
    with pytest.raises(ConfigError, match=sentence):
        settle(one, run, micro)


@pytest.mark.parametrize(("one", "run", "micro"), TAKEN)
def test_other_ways_to_reduce_are_taken(one, run, micro):
    settle(one, run, micro)


@pytest.mark.parametrize(
    ("last", "each", "expected"),
    [
        (False, True, (True, False, True)),
        (True, True, (True, True, True)),
        (False, False, (False, False, False)),
        (True, False, (True, True, True)),
    ],
)
def test_replicas_reduce_in_the_last_micro_batch_alone(last, each, expected):
    said = {}
    names = ("set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_backward")
    model = SimpleNamespace(
        **{name: (lambda value, name=name: said.__setitem__(name, value)) for name in names}
    )
    accelerators.set_communication(model, last=last, each=each)
    assert tuple(said[name] for name in names) == expected
