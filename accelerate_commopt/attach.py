"""Compresses, watches and saves what an Accelerator or a Hugging Face Trainer exchanges."""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from accelerate_commopt import state
from accelerate_commopt.plugin import CommOptPlugin
from accelerate_commopt.supervision import GUARD, Supervision, Watching
from commopt import AttachError, CommOptConfig, CommOptWarning, GuardConfig, Handle, Stats
from commopt.config import Quality

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # what launchers say


def attach(
    target: Any,
    compressor: str = "auto",
    *,
    quality: Quality = "safe",
    error_feedback: bool | None = None,
    timeout: float = 1800.0,
    checked: bool = False,
    guard: GuardConfig | None = GUARD,
    log_every: int = 10,
    snapshot_every: int = 50,
    directory: str | Path | None = None,
    **options: Any,
) -> "Attachment":
    """Compresses the gradients of the models that ``target`` trains. Call it on every rank.

    For an ``Accelerator``: before ``prepare``, or after it, also in the middle of training: it then takes effect with
    the next backward. Before is better, since DDP's buckets are made smaller then (3 MB, where the user chose no size),
    so that gradients begin to travel earlier. For a ``transformers.Trainer``: before ``train``.

    What is measured goes to all trackers, as ``commopt/ratio`` and others (``commopt.monitor.metrics.tracked`` lists
    them; of further models as ``commopt/model_1/ratio``), with the number of exchanged steps as the step. The state of
    commopt is saved and loaded with ``save_state`` and ``load_state``, or the checkpoints of the Trainer, on all ranks.
    What ``accelerator.backward`` is given is the loss that the guard judges, of the models that computed since the last
    backward. A roll-back restores weights, optimizers, schedulers, the gradient scaler and the random generators after
    the optimizer's step; batches are not drawn again.

    Args:
        target: an ``accelerate.Accelerator`` or a ``transformers.Trainer``.
        compressor, quality, error_feedback, timeout, checked, options: as for ``commopt.attach``.
        guard: thresholds of the guard; None only monitors.
        log_every: steps that are averaged before they are logged.
        snapshot_every: steps between two snapshots to go back to.
        directory: of ``commopt.jsonl``, which ``commopt report`` reads. None: the Accelerator's ``logging_dir`` if it
            has one, or the Trainer's ``output_dir``.

    Raises:
        ConfigError: unknown name or option, or a value out of range.
        AttachError: something else has DDP's hook; commopt is attached already; sharded or model parallelism, which is
            not supported yet; several processes that do not know of each other.
        MismatchError: ranks disagree; raised on every rank.
    """
    config = CommOptConfig(compressor, options, error_feedback, timeout, checked, quality)
    return attach_with(target, config, Watching(guard, log_every, snapshot_every, directory))


def attach_with(target: Any, config: CommOptConfig, watching: Watching | None = None) -> "Attachment":
    """`attach`, for who has a configuration."""
    watching = watching or Watching()
    if isinstance(target, Accelerator):
        return Attachment(target, config, watching)
    transformers = sys.modules.get("transformers")  # there is no Trainer without it
    if transformers is not None and isinstance(target, transformers.Trainer):
        from accelerate_commopt.trainer import adopt

        return adopt(target, Attachment(target.accelerator, config, watching))
    raise AttachError(
        f"attach needs an accelerate.Accelerator or a transformers.Trainer, got {type(target).__name__}; "
        "for a model in torch's DDP there is commopt.attach."
    )


class Attachment:
    """What `attach` returns: the switch, the counters, and what watches. `attach` documents it."""

    def __init__(self, accelerator: Accelerator, config: CommOptConfig, watching: Watching) -> None:
        _check(accelerator)
        self.accelerator = accelerator
        self.config = config
        given = accelerator.ddp_handler
        self.plugin = CommOptPlugin(config, given, accelerator)
        self.supervision = Supervision(accelerator, watching, self._log)
        self.plugin.attached = self.supervision.meet
        for model in _wrapped_models(accelerator):
            self.plugin.register_comm_hook(model)
        self._loaded: state.Loaded | None = None

        originals = {name: getattr(accelerator, name) for name in ("backward", "save_state", "end_training")}
        self._backward, self._save_state, self._end_training = originals.values()
        accelerator.backward, accelerator.save_state = self.backward, self._save
        accelerator.end_training = self._end
        accelerator.ddp_handler = self.plugin
        accelerator._commopt = self
        removals = [
            accelerator.register_save_state_pre_hook(lambda models, weights, folder: self.save(folder)).remove,
            accelerator.register_load_state_pre_hook(lambda models, folder: self.load(folder)).remove,
        ]
        self._removals: list[Callable[[], None]] = [*removals, lambda: setattr(accelerator, "ddp_handler", given)]
        self._removals += [partial(delattr, accelerator, name) for name in (*originals, "_commopt")]

    @property
    def handles(self) -> list[Handle]:
        """One a model that was prepared, in that order: its switch and counters."""
        return self.plugin.handles

    @property
    def handle(self) -> Handle:
        """That of the only model.

        Raises:
            AttachError: there is none yet, or several.
        """
        handles = self.handles
        if len(handles) != 1:
            raise AttachError(f"{len(handles)} models are prepared for several processes: see .handles.")
        return handles[0]

    def disable(self) -> None:
        """Sends gradients uncompressed, on all ranks from the same step on (see ``commopt.Handle.disable``); of models
        that are prepared later, too."""
        self._switch(False)

    def enable(self) -> None:
        """Compresses again."""
        self._switch(True)

    def explain(self) -> str:
        """Why gradients travel as they do, a line a model."""
        return "\n".join(handle.explain() for handle in self.handles) or "no model is prepared for several processes."

    def stats(self) -> Stats:
        """Totals of all models since the start: steps, bytes, seconds."""
        parts = [astuple(handle.stats()) for handle in self.handles]
        return Stats(*map(sum, zip(astuple(Stats()), *parts, strict=True)))

    def validation(self, loss: float) -> None:
        """Tells the guard a validation loss, lower is better; the mean over ranks counts. Call it on all ranks. The
        Trainer does it by itself, with ``eval_loss``."""
        for watch in self.supervision.watches:
            watch.supervisor.validation(loss)

    def close(self) -> None:
        """Ends the watch and the exchange. Models cannot be trained in their DDP wrappers any more."""
        self.supervision.close()
        for handle in self.handles:
            handle.close()
        for remove in self._removals:
            remove()
        self._removals.clear()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``accelerator.backward``, of which commopt learns the loss. Begins to watch when it is called first."""
        fresh = self.supervision.follow(self.plugin.models)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            for watch, model, parts in zip(self.supervision.watches, loaded.models, loaded.parts, strict=False):
                watch.supervisor.load_state_dict(model, parts)
        if fresh or loaded:
            self.supervision.restart_clock()
        self.supervision.observe(loss)
        self._backward(loss, **kwargs)

    def save(self, folder: str, seconds: float = state.PATIENCE) -> None:
        """Writes the state of commopt into the folder of a checkpoint. Call it on all ranks, between two steps.

        Args:
            seconds: that ranks wait for each other.

        Raises:
            CheckpointError: a rank did not come, or could not write its file; on all ranks that came.
        """
        if self._loaded is not None:
            self.handles[0].engine.say_once(
                f"{folder} is saved without the state of commopt, which is taken over with the first backward after a "
                "resume: resume from the checkpoint before it.",
                kind="saved too early",
            )
        elif self.supervision.watches:
            trees = [watch.supervisor.state_dict() for watch in self.supervision.watches]
            state.save(folder, trees, self.accelerator.process_index, seconds)
            self.supervision.restart_clock()

    def load(self, folder: str) -> None:
        """Goes on from the state in the folder of a checkpoint, with the next backward. Call it on all ranks, when
        models are prepared.

        Raises:
            CheckpointError: some rank's part cannot be used; raised on every rank.
        """
        handles = self.handles
        if not handles:
            return
        self._loaded = state.load(folder, len(handles), self.accelerator.num_processes)
        if self._loaded is None:
            handles[0].engine.say_once(
                f"{folder} comes without the state of commopt: training goes on with the weights, and residuals begin "
                "at zero."
            )

    def _save(self, *args: Any, **kwargs: Any) -> Any:
        """``accelerator.save_state``, which waits for all ranks without an end where it numbers the folders."""
        if self.handles:
            state.come_together(self.accelerator.process_index)
        return self._save_state(*args, **kwargs)

    def _end(self) -> None:
        end = self._end_training
        self.close()  # before Accelerate ends the processes' group
        end()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self.accelerator.log(dict(values), step=step)

    def _switch(self, compress: bool) -> None:
        self.plugin.compress = compress
        for handle in self.handles:
            (handle.enable if compress else handle.disable)()


def _check(accelerator: Accelerator) -> None:
    if hasattr(accelerator, "_commopt"):
        raise AttachError(
            "commopt is attached to this Accelerator already: attach once, or close() what the first call returned. "
            "(`python -m accelerate_commopt` attaches by itself.)"
        )
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise AttachError(
            f"{kind} shards what it trains or has an exchange of its own, which commopt does not support yet: it "
            "compresses what DistributedDataParallel exchanges. Leave the plugin out to train with that."
        )
    parallelism = accelerator.parallelism_config
    if parallelism is not None:
        kinds = ("tp", "cp", "sp", "dp_shard")
        on = [f"{name}_size" for name in kinds if getattr(parallelism, f"{name}_enabled", False)]
        if on:
            raise AttachError(
                f"ParallelismConfig({', '.join(on)}) is not supported by commopt yet, which compresses what "
                "DistributedDataParallel exchanges: leave it out, or leave commopt out."
            )
    if accelerator.num_processes > 1:
        return
    launched = max((int(os.environ.get(name) or 1) for name in _SIZES), default=1)
    if launched > 1:
        raise AttachError(
            f"{launched} processes were launched, but this Accelerator is alone: each of them would train a model of "
            "its own. On CPUs use Accelerator(cpu=True), TrainingArguments(use_cpu=True) or ACCELERATE_USE_CPU=true."
        )
    warnings.warn(
        "one process has nobody to exchange gradients with: commopt does nothing. If there should be several: "
        "`accelerate launch` starts a single one on CPUs, whatever num_processes says, unless MPI runs it: use "
        "`commopt launch` or torchrun.",
        CommOptWarning,
        stacklevel=5,
    )


def _wrapped_models(accelerator: Accelerator) -> list[DistributedDataParallel]:
    """The DDP models around those that were prepared, in that order. An Accelerator holds only what is within them."""
    if not accelerator._models:
        return []
    order = {id(model): index for index, model in enumerate(accelerator._models)}
    # By type, since isinstance asks objects, of which some do things when they are asked.
    alive = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return sorted((each for each in alive if id(each.module) in order), key=lambda each: order[id(each.module)])
