"""The session of a trace: a few steps of the loop, profiled; nothing is saved or uploaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import ProfileKwargs
from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from config.compose import load_config
from config.schema import Config, ConfigError
from planning.allocation_log import CLIP, SUM, UPDATE, LiveBytes
from planning.fake_trace import CUDA_GRANULE
from tracing.page import HELD, Result, report
from tracing.parts import held_by
from tracing.spans import AGREEMENT, BACKWARD, BLOCK, FORWARD, PREPARE, STEP
from training.distributed.accelerator import unwrapped
from training.distributed.environment import silence_profiler
from training.exits import EXIT_DONE
from training.run.run_dir import has_snapshot
from training.run.session import Due, Session

STEPS = 3
"""Number of profiled steps. One more step counts memory, which takes longer."""
NEVER = 10**9


@contextmanager
def track_kinds(memory: LiveBytes, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Record the allocations of a step that is not the first, each with its kind."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    memory.mark(model.parameters(), "parameters")
    memory.mark((parameter.grad for parameter in parameters), "gradients")  # DDP's buckets
    for state in optimizer.state.values():
        memory.mark(state.values(), "optimizer")
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: memory.mark([parameter.grad], "gradients")
        )
        for parameter in parameters
    ]
    with memory:
        yield
    for hook in hooks:
        hook.remove()


def load_traced_config(arguments: list[str]) -> Config:
    """The configuration of a trace: that of train.py, in a directory next to the run's own.

    Raises ConfigError as `load_config` does.
    """
    config = load_config(arguments)
    config.run.dir = f"{config.run.dir}-trace"
    if has_snapshot(Path(config.run.dir)):  # a trace saves none
        raise ConfigError(
            f"a trace would be written to {config.run.dir}, which holds a run with snapshots. Name "
            "another run.dir."
        )
    config.run.tracker, config.hub.repo_id, config.hub.url = (None,) * 3
    config.snapshot.resume, config.snapshot.every = "auto", NEVER
    config.snapshot.every_minutes = None
    config.train.sample_every, config.train.log_every = 0, NEVER
    config.train.max_steps = max(config.train.max_steps, STEPS + 2)
    return config


class TracedSession(Session):
    """A session that profiles the first steps, counts the memory of the next, and ends."""

    def begin(self, accelerator: Accelerator) -> None:
        """Begin as `Session` does, and start the profiler."""
        super().begin(accelerator)
        on_gpu = accelerator.device.type == "cuda"
        self._memory = LiveBytes(CUDA_GRANULE if on_gpu else 1)
        silence_profiler()
        self._profiler = ExitStack()
        handler = ProfileKwargs(
            activities=["cpu", "cuda"] if on_gpu else ["cpu"],
            record_shapes=True,
            output_trace_dir=self.config.run.dir,
        )
        self._profiler.enter_context(accelerator.profile(handler))
        for method, part in (
            ("prepare", PREPARE),
            ("backward", BACKWARD),
            ("clip_grad_norm_", CLIP),
        ):
            setattr(accelerator, method, self._as_part(part, getattr(accelerator, method)))

    def restore(
        self, model: nn.Module, optimizer: AcceleratedOptimizer, held_out_loader: DataLoaderShard
    ) -> None:
        """Restore as `Session` does, and name the forward pass, its blocks and the update."""
        super().restore(model, optimizer, held_out_loader)
        self._optimizer = optimizer.optimizer
        self._name_calls(model, FORWARD)
        bare = unwrapped(self.accelerator, model)
        held = held_by(bare, self.config.data.block_size)
        path = Path(self.config.run.dir) / HELD.format(self.accelerator.process_index)
        path.write_text(json.dumps(held), encoding="utf-8")
        if bare.tensors is not None:
            bare.tensors.sum_gradients = self._as_part(SUM, bare.tensors.sum_gradients)  # type: ignore
        for number, block in enumerate(bare.blocks):
            self._name_calls(block, f"{BLOCK} {number}")
        self._optimizer.register_step_pre_hook(lambda *_: self._place(UPDATE))

    def steps(self) -> Iterator[int]:
        """The profiled steps, and the counted one."""
        first = self.next_step
        for step in super().steps():
            if step < first + STEPS:
                with record_function(f"{STEP} {step}"):
                    yield step
                continue
            self.report.pause_clock()
            self._profiler.close()  # every process writes its trace
            self.report.resume_clock()
            self._memory.place = ()
            with track_kinds(self._memory, self._model, self._optimizer):
                yield step
            return

    def finish_step(self, *figures: Any, **metrics: Any) -> Due:
        """Finish a step as `Session` does, but nothing is due."""
        with self._during(AGREEMENT):
            super().finish_step(*figures, **metrics)
        return Due()

    def end(self) -> int:
        """Write the page, in the main process, and return the exit code."""
        self.report.pause_clock()
        result = Result.of(self, self._model, self._memory)
        # The estimate needs a process group of its own, which does not exist next to another.
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        if self.accelerator.is_main_process:
            self.console.close()
            report(result, Path(self.config.run.dir), self.console.say)
        return EXIT_DONE

    @contextmanager
    def _during(self, part: str) -> Iterator[None]:
        """Name a part of the step, for the profiler and for the log of allocations."""
        self._place(part)
        with record_function(part):
            yield

    def _place(self, part: str) -> None:
        self._memory.place = (part,)

    def _as_part(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def named(*arguments: Any, **options: Any) -> Any:
            with self._during(part):
                return method(*arguments, **options)

        return named

    def _name_calls(self, module: nn.Module, name: str) -> None:
        """Name a module's calls, those in recomputation as well."""
        open_ranges: list[record_function] = []

        def enter(*_: Any) -> None:
            if name == FORWARD:
                self._place(FORWARD)
            open_ranges.append(record_function(name))
            open_ranges[-1].__enter__()

        def leave(*_: Any) -> None:
            open_ranges.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)
