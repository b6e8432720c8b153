"""What watches the models of an Accelerator: a supervisor each, told of losses and of the end of steps."""

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import Tensor

from commopt import ConfigError, GuardConfig, Handle, Monitor, RandomState, Supervisor
from commopt.monitor.metrics import tracked
from commopt.records import Event, StepRecord
from commopt.resume.snapshot import Stateful

GUARD = GuardConfig()


@dataclass(frozen=True)
class Watching:
    """How training is watched; `accelerate_commopt.attach` says what each of these is.

    Raises:
        ConfigError: a value out of range.
    """

    guard: GuardConfig | None = GUARD
    log_every: int = 10
    snapshot_every: int = 50
    directory: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("log_every", "snapshot_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)!r}.")


class Supervision:
    """The watch over all models of ``accelerator`` that commopt is attached to. Everything is called on all ranks.

    Args:
        log: called with values and the step of the exchange; on a process that does not log it does nothing.
    """

    def __init__(
        self, accelerator: Accelerator, watching: Watching, log: Callable[[Mapping[str, float], int], None]
    ) -> None:
        self.watching = watching
        self.watches: list[Watch] = []
        self.log = log
        self.optimizers: Callable[[], list[Any]] = lambda: list(accelerator._optimizers)
        self.schedulers: Callable[[], list[Any]] = lambda: list(accelerator._schedulers)
        self.parts: Callable[[], float] = lambda: 1.0  # that the loss was divided by before it came here
        self._accelerator = accelerator
        self._computed: set[int] = set()  # ids of modules, since the last backward
        self._hooks: list[Callable[[], None]] = []
        self._ends_steps: WeakSet[AcceleratedOptimizer] = WeakSet()

    def meet(self, module: torch.nn.Module, handle: Handle) -> None:
        """Gets to know a model that was just attached to, and which is not watched before its first backward."""

        def computes(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._computed.add(id(module))

        def judge(record: StepRecord) -> bool:
            handle.engine.say_once(
                "gradients are exchanged, but nothing watches: call accelerator.backward(loss), not loss.backward()."
            )
            return record.usable

        self._hooks.append(module.register_forward_pre_hook(computes).remove)
        handle.judge = judge

    def follow(self, models: list[tuple[torch.nn.Module, Handle]]) -> "list[Watch]":
        """Begins to watch those that are not watched yet, and gives up those that are not among ``models``. Returns the
        new ones."""
        handles = [handle for _, handle in models]
        for watch in [watch for watch in self.watches if watch.handle not in handles]:
            watch.close()
            self.watches.remove(watch)
        known = [watch.handle for watch in self.watches]
        fresh = [self._watch(*entry, handles.index(entry[1])) for entry in models if entry[1] not in known]
        self.watches += fresh
        return fresh

    def observe(self, loss: Tensor) -> None:
        """Tells the loss of the backward to come to the models that it is of: that computed since the last one."""
        samples = _samples(self._accelerator)
        for watch in self.watches:
            if id(watch.module) in self._computed or len(self.watches) == 1:
                watch.supervisor.observe(loss.detach() * self.parts(), samples)
        self._computed.clear()

    def restart_clock(self) -> None:
        """What lies between now and the last step is no part of a step."""
        for watch in self.watches:
            watch.handle.engine.restart_clock()

    def end(self) -> None:
        """Ends the watch, which begins anew with the next backward."""
        for watch in self.watches:
            watch.close()
        self.watches.clear()

    def close(self) -> None:
        """Ends the watch for good."""
        self.end()
        for remove in self._hooks:
            remove()
        self._hooks.clear()

    def _watch(self, module: torch.nn.Module, handle: Handle, index: int) -> "Watch":
        accelerator = self._accelerator
        name = f"model_{index}" if index else ""
        optimizers = [each for each in self.optimizers() if _holds(each, handle)]
        inner = {id(each.optimizer) for each in optimizers}
        schedulers = [each for each in self.schedulers() if id(_optimizer_of(each)) in inner]
        for optimizer in optimizers:
            self._tell_of_steps(optimizer)
        if not optimizers:
            handle.engine.say_once(
                "no optimizer of this model went through accelerator.prepare, so that its steps are exchanged and "
                "judged, but neither logged nor taken back: prepare the optimizer, too."
            )
        return Watch(accelerator, self.watching, name, module, handle, optimizers, schedulers)

    def _tell_of_steps(self, optimizer: AcceleratedOptimizer) -> None:
        """Not torch's hook of the step: a gradient scaler that passes over a step does not call it. The wrapper stays
        where it is, as a scheduler may wrap it once more."""
        if optimizer in self._ends_steps:
            return
        self._ends_steps.add(optimizer)
        step = optimizer.step

        @functools.wraps(step)
        def stepped(_: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            for watch in self.watches:
                if optimizer in watch.optimizers and (values := watch.end_step()):
                    self.log(values, watch.handle.engine.step)
            return result

        optimizer.step = MethodType(stepped, optimizer)  # a method, which schedulers insist on


class Watch:
    """The supervisor of one model, and what it needs."""

    def __init__(
        self,
        accelerator: Accelerator,
        watching: Watching,
        name: str,
        module: torch.nn.Module,
        handle: Handle,
        optimizers: list[AcceleratedOptimizer],
        schedulers: list[Any],
    ) -> None:
        self.module = module
        self.handle = handle
        self.optimizers = optimizers
        self._prefix = f"commopt/{name}/" if name else "commopt/"
        states: dict[str, Stateful] = {"model": module}
        states |= {f"optimizer {index}": each for index, each in enumerate(optimizers)}
        states |= {f"scheduler {index}": each for index, each in enumerate(schedulers)}
        if accelerator.scaler is not None:
            states["scaler"] = accelerator.scaler
        directory = watching.directory or accelerator.logging_dir
        config, plan = handle.config, handle.engine.configured
        chosen = {"compressor": repr(plan.compressor), "error_feedback": plan.feedback}
        monitor = Monitor(
            directory and Path(directory) / name,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            every=watching.log_every,
            parameters={"compressor": "auto", "quality": config.quality} if config.automatic else chosen,
        )
        handle.judge = None  # that of `Supervision.meet`
        self.supervisor = Supervisor(
            handle,
            states | {"random": RandomState()} if watching.guard is not None and optimizers else {},
            guard=watching.guard,
            monitor=monitor,
            every=watching.snapshot_every,
        )
        self._logged = self.supervisor.window

    def end_step(self) -> dict[str, float]:
        """Takes a snapshot where one is due, or goes back to one. Returns what a window tells that is complete now."""
        engine, supervisor = self.handle.engine, self.supervisor
        before = engine.step
        if supervisor.end_step(before) <= before:
            text = (
                "the batches since then are not drawn again, training goes on with those that come; learning rates "
                "went back with the weights."
            )
            supervisor.monitor.event(Event(engine.step, "note", text))
            engine.say_once(text)
        window = supervisor.window
        if window is None or window is self._logged:
            return {}
        self._logged = window
        values = tracked(window, supervisor.monitor.summary().events, self.handle.device)
        return {self._prefix + name: value for name, value in values.items()}

    def close(self) -> None:
        """Ends the watch; the monitor writes its summary."""
        self.supervisor.close()


def _holds(optimizer: AcceleratedOptimizer, handle: Handle) -> bool:
    mine = {id(parameter) for parameter in handle.parameters}
    return any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])


def _optimizer_of(scheduler: Any) -> Any:
    """Torch's, whichever of the two Accelerate has wrapped."""
    optimizer = getattr(scheduler, "scheduler", scheduler).optimizer
    return getattr(optimizer, "optimizer", optimizer)


def _samples(accelerator: Accelerator) -> float | None:
    """In a batch of this rank; None where the loader cannot tell."""
    loader = accelerator.gradient_state.active_dataloader
    with suppress(AttributeError, TypeError):  # each loader has its own way of not knowing
        return float(loader.total_batch_size) / float(accelerator.num_processes)
    return None
