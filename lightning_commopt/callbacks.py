"""What watches a fit, as Lightning callbacks: they hold the options, and the strategy's supervisor does the work.

The mixins stand before a ``Callback`` of `lightning` or of `pytorch_lightning`, and document it.
"""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from commopt.errors import CommOptWarning, ConfigError, unknown
from commopt.guard import GuardConfig
from commopt.monitor import Monitor, Window, render
from commopt.monitor.metrics import tracked
from commopt.supervisor import Supervisor

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
else:
    Callback = object

IN_THE_BAR = {"ratio": "comm/comp", "compression_ratio": "saving"}  # short, as the bar has little room


class Monitoring(Callback):
    """What is measured of each step, and where it goes.

    Means over ``every`` steps go to the trainer's loggers as ``commopt/ratio``, ``commopt/exposed_share``,
    ``commopt/compression_ratio``, ``commopt/step_seconds``, ``commopt/throughput``, ``commopt/bytes_sent``,
    ``commopt/cosine`` ... (see ``commopt.monitor.Window``), over all ranks; the first and the third stand in the
    progress bar as ``comm/comp`` and ``saving``. ``commopt/residual_ratio`` is that of rank 0. ``commopt/events`` and
    ``commopt/roll_backs`` count what the guard did. Rank 0 appends windows and events to ``commopt.jsonl``, which
    ``commopt report`` reads.

    Args:
        every: steps of a window; None: the trainer's ``log_every_n_steps``.
        directory: of ``commopt.jsonl``; None: that of the logger. Without a logger nothing is written then.
        threshold: exposed share, from 0 to 1, under which the advice is to do nothing.
        gpu_hour_price: of one GPU, in any currency.
        json_lines: whether ``commopt.jsonl`` is written.
        summary: whether rank 0 prints a table at the end; None: where the trainer has a progress bar.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        every: int | None = None,
        directory: str | Path | None = None,
        threshold: float = 0.2,
        gpu_hour_price: float | None = None,
        json_lines: bool = True,
        summary: bool | None = None,
    ) -> None:
        Monitor(every=1 if every is None else every, threshold=threshold, gpu_hour_price=gpu_hour_price)  # checks
        self.every = every
        self.directory = directory
        self.threshold = threshold
        self.gpu_hour_price = gpu_hour_price
        self.json_lines = json_lines
        self.summary = summary
        self._logged: Window | None = None

    def make(self, trainer: Any, parameters: Mapping[str, Any]) -> Monitor:
        """The monitor of one fit. Call it on all ranks."""
        directory = self.directory or (trainer.log_dir if trainer.loggers else None)  # log_dir is rank 0's
        real = not trainer.fast_dev_run and not trainer.barebones
        writes = self.json_lines and real and "://" not in str(directory)
        return Monitor(
            directory if writes else None,
            rank=trainer.global_rank,
            world=trainer.world_size,
            every=self.every or max(trainer.log_every_n_steps, 1),
            threshold=self.threshold,
            gpu_hour_price=self.gpu_hour_price,
            parameters=parameters,
        )

    def setup(self, trainer: Any, pl_module: "LightningModule", stage: str) -> None:
        """Warns of a strategy that exchanges nothing through commopt: there is nothing to do then."""
        _check_strategy(self, trainer)
        self._logged = None

    def on_train_batch_end(self, trainer: Any, pl_module: "LightningModule", *_: Any) -> None:
        """Logs the window that this step completed."""
        supervisor = _supervisor(trainer)
        window = supervisor.window if supervisor is not None else None
        if supervisor is None or window is None or window is self._logged or trainer.barebones:
            return
        self._logged = window
        for name, value in tracked(window, supervisor.monitor.summary().events, pl_module.device).items():
            pl_module.log(f"commopt/{name}", value, on_step=True, on_epoch=False)
            if name in IN_THE_BAR:
                pl_module.log(IN_THE_BAR[name], value, on_step=True, on_epoch=False, prog_bar=True, logger=False)

    def on_fit_end(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Prints the table of where the time went."""
        supervisor = _supervisor(trainer)
        wanted = trainer.progress_bar_callback is not None if self.summary is None else self.summary
        if supervisor is not None and trainer.is_global_zero and wanted:
            Console().print(render(supervisor.monitor.summary()))


class Guarding(Callback):
    """When a fit is in trouble, and how far back it can go.

    A roll-back restores weights, optimizers, schedulers, the gradient scaler, the random generators and the exchange,
    and the loop's progress, so that ``global_step`` goes back, too. Batches are drawn again from where they were if
    every training ``DataLoader`` has a map-style dataset whose order depends on nothing but the epoch (torch's
    distributed sampler, which Lightning puts in, or a sequential one); from others training goes on with the batches
    that come next, and a warning says so.
    Callbacks keep what they know: ``ModelCheckpoint`` its files, ``EarlyStopping`` its best value.

    Args:
        enabled: False only monitors: no step is skipped, and no snapshot is taken.
        monitor: a logged validation metric of which less is better; passed over where it is not logged.
        snapshot_every: steps between two snapshots.
        keep: most snapshots that are held.
        memory_gb: most host memory for them on each rank, in 10^9 bytes; None: a share of what is free.
        thresholds: those of ``commopt.guard.GuardConfig``, such as ``sigma=8``.

    Raises:
        ConfigError: an option is unknown or out of range.
    """

    def __init__(
        self,
        enabled: bool = True,
        monitor: str | None = "val_loss",
        snapshot_every: int = 50,
        keep: int = 4,
        memory_gb: float | None = None,
        **thresholds: Any,
    ) -> None:
        own = inspect.signature(Guarding).parameters.keys() - {"thresholds"}
        valid = own | {entry.name for entry in fields(GuardConfig)}
        for name in thresholds.keys() - valid:
            raise unknown(f"argument of {type(self).__name__}:", name, valid)
        limits = {"snapshot_every": (snapshot_every, 1), "keep": (keep, 1), "memory_gb": (memory_gb or 0, 0)}
        for name, (value, least) in limits.items():
            if not value >= least:
                raise ConfigError(f"{name} must be at least {least}, got {value!r}.")
        self.enabled = enabled
        self.config = GuardConfig(**thresholds)
        self.monitor = monitor
        self.snapshot_every = snapshot_every
        self.keep = keep
        self.memory = None if memory_gb is None else int(memory_gb * 1e9)

    def setup(self, trainer: Any, pl_module: "LightningModule", stage: str) -> None:
        """Warns of a strategy that exchanges nothing through commopt: there is nothing to do then."""
        _check_strategy(self, trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: "LightningModule") -> None:
        """What lies between epochs is no part of a step."""
        _restart_clock(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: "LightningModule", *_: Any) -> None:
        """Takes a snapshot where one is due, or goes back to one."""
        supervisor = _supervisor(trainer)
        if supervisor is None:
            return
        begun = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if supervisor.end_step(begun - 1) < begun:
            # What this epoch has logged so far is of batches that were not trained on, after all.
            trainer.fit_loop._results.reset()

    def on_validation_end(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Judges the validation metric."""
        supervisor = _supervisor(trainer)
        if supervisor is None or trainer.sanity_checking:
            return
        if self.enabled and self.monitor:
            value = trainer.callback_metrics.get(self.monitor)
            if trainer.strategy.reduce_boolean_decision(value is not None):  # some models log on rank 0 only
                supervisor.validation(float(value))
        _restart_clock(trainer)


def _check_strategy(callback: Callback, trainer: Any) -> None:
    if not hasattr(trainer.strategy, "supervisor") and trainer.is_global_zero:
        warnings.warn(
            f"{type(callback).__name__} does nothing with {type(trainer.strategy).__name__}: it needs "
            "Trainer(strategy='commopt_ddp').",
            CommOptWarning,
            stacklevel=3,
        )


def _supervisor(trainer: Any) -> Supervisor | None:
    """That of the fit under way; there may be one left from an earlier fit, and other strategies have none."""
    supervisor: Supervisor | None = getattr(trainer.strategy, "supervisor", None)
    return supervisor if trainer.state.fn == "fit" else None


def _restart_clock(trainer: Any) -> None:
    supervisor = _supervisor(trainer)
    if supervisor is not None:
        supervisor.engine.restart_clock()
