"""How gradients are reduced: what is refused, and what FSDP sends when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType

from config.schema import Config, ConfigError, RunConfig
from training.distributed import accelerator as accelerators
from training.distributed.accelerator import check_configuration


@pytest.mark.parametrize(("offloads", "sync_each"), [(True, False), (True, True), (False, False)])
def test_whole_weights_on_the_device_are_refused_where_shards_are_on_the_cpu(offloads, sync_each):
    offload = SimpleNamespace(pin_memory=True) if offloads else None
    accelerator = SimpleNamespace(
        num_processes=1,
        distributed_type=DistributedType.FSDP,
        is_fsdp2=True,
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(cpu_offload=offload)),
        parallelism_config=None,
    )
    config = Config(run=RunConfig(sync_each_micro_batch=sync_each))
    if sync_each or not offloads:
        check_configuration(accelerator, config)
        return
    with pytest.raises(ConfigError, match="fsdp_offload_params: true shards on the CPU"):
        check_configuration(accelerator, config)


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
