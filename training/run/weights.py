"""The weights that a run begins with, in a model that accelerate has prepared."""

from __future__ import annotations

from accelerate import Accelerator
from torch.optim import Optimizer

from model.causal_lm import LanguageModel
from snapshot.disk.state import RunState, restore
from snapshot.start import Start
from training.distributed.agreement import run_on_all
from training.run.pretrained import PretrainedModel


def read_weights(
    accelerator: Accelerator,
    pretrained: PretrainedModel | None,
    start: Start,
    state: RunState,
    model: LanguageModel,
    optimizer: Optimizer,
) -> None:
    """Read weights and optimizer state of the snapshot, or else the weights of a base.

    Every process must call this. Raises SnapshotError.
    """
    if pretrained is not None:
        pretrained.load(model)
    if (folder := start.folder) is not None:
        run_on_all(accelerator, lambda: restore(folder, model, optimizer))
        if accelerator.scaler is not None and state.loss_scaler is not None:
            accelerator.scaler.load_state_dict(state.loss_scaler)
