"""What ties a `commopt.supervisor.Supervisor` to each fit of a strategy, and its state to Lightning's checkpoints."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from commopt import Handle
from commopt.errors import CheckpointError
from commopt.records import Event
from commopt.resume import checkpoint as sidecar
from commopt.resume.snapshot import Stateful
from commopt.supervisor import Supervisor
from lightning_commopt.callbacks import Guarding, Monitoring
from lightning_commopt.position import Generators, Position, Weights

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = object

KEY = "commopt"  # in a checkpoint
PATIENCE = 60.0  # seconds that a save waits for the other ranks
PATIENCE_AFTER_AN_ERROR = 5.0  # they may never come


class Supervised(DDPStrategy):
    """Mixin before a ``DDPStrategy`` that sets ``handle`` for each fit."""

    monitoring: ClassVar[type[Monitoring]]
    guarding: ClassVar[type[Guarding]]
    asynchronous: ClassVar[type]  # CheckpointIO that writes later

    handle: Handle | None
    """Switch and counters of the model in training, or of the last one; None before the first fit."""
    supervisor: Supervisor | None
    """What watches the fit, from its first batch on, or watched the last one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.handle = None
        self.supervisor = None
        self._generators: Generators | None = None
        self._samples: float | None = None
        self._loaded: tuple[str, object] | None = None  # checkpoint that the next fit goes on from, and its reference

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def setup_environment(self) -> None:
        """Adds the callbacks that watch and guard, where the user gave none, before any hook of theirs is called."""
        super().setup_environment()
        self._loaded = None
        if self._trainer.state.fn == "fit":
            mine = [
                next((callback for callback in self._trainer.callbacks if isinstance(callback, kind)), None) or kind()
                for kind in (self.monitoring, self.guarding)
            ]
            self._trainer.callbacks = [*mine, *(each for each in self._trainer.callbacks if each not in mine)]

    def on_train_start(self) -> None:
        """Remembers the random generators as they are before the first batch."""
        super().on_train_start()
        self._generators = Generators()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begins to watch with the first batch, when Lightning has settled where it stands."""
        super().on_train_batch_start(batch, batch_idx)
        if self.supervisor is None:
            self._supervise()
        self._samples = _batch_size(batch)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Tells the loss, which Lightning has divided by the number of batches that it accumulates."""
        if self.supervisor is not None:
            assert self.lightning_module is not None
            automatic = self.lightning_module.automatic_optimization
            parts = self._trainer.accumulate_grad_batches if automatic else 1
            self.supervisor.observe(closure_loss.detach() * parts, self._samples)
            self._samples = self._samples and 0.0  # a batch that has several backwards counts once
        super().pre_backward(closure_loss)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the state of commopt beside the checkpoint of a fit, one file a rank. Call it on all ranks.

        Raises:
            CheckpointError: a rank did not come, or could not write its file; on all ranks that came. Rank 0 has
                written Lightning's own checkpoint then, without the state of commopt.
        """
        supervisor, error = self.supervisor, None
        if supervisor is None and self._loaded is not None and self.handle is not None:
            self.handle.engine.say_once(
                f"{filepath} is saved without the state of commopt, which is taken over with the first batch of a "
                "resumed fit: resume from the checkpoint before it.",
                kind="saved too early",
            )
        wanted = supervisor is not None and "optimizer_states" in checkpoint and self._sidecar_fits(filepath)
        if supervisor is not None and wanted:
            seconds = PATIENCE_AFTER_AN_ERROR if self._trainer.interrupted else PATIENCE
            try:
                saved = sidecar.save_together(filepath, supervisor.state_dict(), None, seconds=seconds)
                checkpoint[KEY] = sidecar.reference(saved.save_id)
            except CheckpointError as problem:
                error = problem
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if error is not None:
            if self._trainer.interrupted:  # Lightning does not come to the teardown then
                self._end()
            raise CheckpointError(f"{filepath} has no state of commopt: {error}") from error
        if supervisor is not None and wanted:
            self.barrier("commopt: the checkpoint is in place")
            sidecar.prune(saved.checkpoint, keep=saved.save_id)
            supervisor.engine.restart_clock()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes what lies beside it, too; on rank 0, whose checkpoint it is: others may think of another one."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero and is_local(filepath):
            sidecar.remove(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Keeps in mind what the next fit goes on from; there is no exchange yet to load it into."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._loaded = os.fspath(checkpoint_path), checkpoint.get(KEY)
        return checkpoint

    def teardown(self) -> None:
        """Ends the watch and the exchange; what they counted can still be read."""
        self._end()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: the exchange, and what watches it."""
        kept: dict[str, Any] = super().__getstate__()
        return kept | {"handle": None, "supervisor": None, "_generators": None}

    def _end(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close()
        if self.handle is not None:
            self.handle.close()

    def _supervise(self) -> None:
        trainer = self._trainer
        monitoring = next((each for each in trainer.callbacks if isinstance(each, self.monitoring)), None)
        guarding = next((each for each in trainer.callbacks if isinstance(each, self.guarding)), None)
        if self.handle is None or monitoring is None or guarding is None:
            return  # a tuner of Lightning's tries something out
        loaded, self._loaded = self._loaded, None
        state, parts = (None, None) if loaded is None else read_together(self.handle, *loaded)
        plan, config = self.handle.engine.configured, self.handle.config
        chosen = {"compressor": repr(plan.compressor), "error_feedback": plan.feedback}
        self.supervisor = Supervisor(
            self.handle,
            self._states() if guarding.enabled else {},
            guard=guarding.config if guarding.enabled else None,
            monitor=monitoring.make(
                trainer, {"compressor": "auto", "quality": config.quality} if config.automatic else chosen
            ),
            every=guarding.snapshot_every,
            keep=guarding.keep,
            memory=guarding.memory,
            position=trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1,
        )
        if state is not None:
            self.supervisor.load_state_dict(state, parts)
        self.supervisor.engine.restart_clock()

    def _states(self) -> dict[str, Stateful]:
        """What a roll-back restores, in this order: drawing batches again moves the random generators."""
        assert self.lightning_module is not None
        states: dict[str, Stateful] = {"weights": Weights(self.lightning_module)}
        states |= {f"optimizer {index}": optimizer for index, optimizer in enumerate(self.optimizers)}
        schedulers = (config.scheduler for config in self.lr_scheduler_configs)
        states |= {f"scheduler {index}": scheduler for index, scheduler in enumerate(schedulers)}
        states |= {"precision": self.precision_plugin, "position": Position(self._trainer, self._note)}
        return states | {"random": self._generators or Generators()}

    def _note(self, text: str) -> None:
        assert self.supervisor is not None
        engine = self.supervisor.engine
        self.supervisor.monitor.event(Event(engine.step, "note", text))
        engine.say_once(text)

    def _sidecar_fits(self, path: Any) -> bool:
        assert self.supervisor is not None
        if is_local(path) and not isinstance(self.checkpoint_io, self.asynchronous):
            return True
        self.supervisor.engine.say_once(
            f"{path} is saved without the state of commopt, which lies beside a checkpoint on a local file system that "
            "is written at once. After a resume residuals begin at zero.",
            kind="no sidecar",
        )
        return False


def read_together(
    handle: Handle, path: str, carried: object
) -> tuple[Mapping[str, Any] | None, Sequence[Mapping[str, Any]] | None]:
    """What this rank goes on from, and what other ranks had where their number changed. None where there is nothing, on
    all ranks alike. Call it on all ranks.

    Args:
        carried: the reference in the checkpoint at ``path``.

    Raises:
        CheckpointError: some rank's part cannot be used; raised on every rank.
    """
    found = sidecar.load_together(path, carried if is_local(path) else None, None, seconds=handle.config.timeout)
    if found is None:
        handle.engine.say_once(
            f"{path} comes without the state of commopt: training goes on with the weights, and residuals begin at "
            "zero."
        )
        return None, None
    return found.tree, None if found.world == handle.engine.wire.world else found.parts


def is_local(path: Any) -> bool:
    """Whether a sidecar can lie beside it."""
    return "://" not in os.fspath(path)


def _batch_size(batch: Any) -> float | None:
    """The length of the first tensor in a batch; None where there is none."""
    if isinstance(batch, Tensor):
        return float(batch.shape[0]) if batch.ndim else 1.0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for size in map(_batch_size, parts) if size is not None), None)
