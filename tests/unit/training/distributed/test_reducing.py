"""How gradients are reduced: what FSDP sends when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from training.distributed import accelerator as accelerators


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
