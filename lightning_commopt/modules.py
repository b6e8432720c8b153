"""What makes Fabric's DDPStrategy exchange compressed gradients.

`lightning.fabric` and `lightning_fabric` carry the same classes twice and refuse those of the other. The mixin is for
both; the modules ``fabric`` and ``lightning_fabric`` beside this file each make a strategy of it.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from commopt import AttachError, ConfigError, Handle, Supervisor
from commopt.errors import CommOptWarning
from commopt.resume import checkpoint as sidecar
from commopt.resume.snapshot import Stateful
from commopt.supervisor import EXCHANGE
from lightning_commopt.arguments import Compressing
from lightning_commopt.supervision import KEY, PATIENCE, is_local, read_together

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy
else:
    DDPStrategy = object


class CompressedModules(Compressing, DDPStrategy):
    """Mixin before a ``DDPStrategy`` of Fabric: attaches commopt to each model that ``fabric.setup`` wraps, on CPU and
    on CUDA. Its arguments are those of `Compressing`.

    Steps that are not finite are skipped on all ranks, and ``fabric.save`` and ``fabric.load`` keep the state of the
    exchange. The loop is the user's own, so that nothing else watches it, unless it is asked for:

        model, optimizer = fabric.setup(model, optimizer)
        watch = fabric.strategy.supervise(model, {"model": model, "optimizer": optimizer}, monitor=Monitor("runs/1"))
        ...
        watch.observe(loss)                # before fabric.backward(loss)
        step = watch.end_step(step)        # after optimizer.step(); an earlier step after a roll-back
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By what is within DDP, not by DDP itself: torch ends the hooks of that with its last reference.
        self._attached: list[tuple[Module, Handle]] = []
        self._watches: dict[Handle, Supervisor] = {}

    @property
    def handles(self) -> list[Handle]:
        """Switch and counters of each model that was set up, in this order."""
        return self._handles()

    @property
    def handle(self) -> Handle | None:
        """That of the first model; None before any was set up."""
        return next(iter(self._handles()), None)

    def handle_of(self, model: Module) -> Handle:
        """That of a ``model`` which ``fabric.setup`` returned.

        Raises:
            AttachError: this strategy has not set it up.
        """
        within = {id(module) for module in model.modules()}
        for module, handle in self._attached:
            if id(module) in within:
                return handle
        raise AttachError(f"Fabric has not set up this {type(model).__name__}: call fabric.setup(model) first.")

    def supervise(self, model: Module, states: Mapping[str, Stateful] | None = None, **options: Any) -> Supervisor:
        """Watches the training of ``model``: see ``commopt.Supervisor`` for ``states`` and options, and for what the
        loop has to call. What it knows is saved and loaded with the exchange. Call it on all ranks.

        Raises:
            AttachError: the model was not set up, or has a supervisor already.
        """
        handle = self.handle_of(model)
        watch = self._watches[handle] = Supervisor(handle, states or {}, **options)
        return watch

    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wraps the model into DDP, and attaches to it. What was attached to an earlier wrapper of it ends."""
        for entry in [entry for entry in self._attached if entry[0] is module]:
            self._end(entry[1])
            self._attached.remove(entry)
        model: DistributedDataParallel = super().setup_module(module)
        self._attached.append((module, self._attach(model, getattr(self.precision, "scaler", None))))
        return model

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Writes the state of commopt beside the checkpoint, for the models in ``state``, one file a rank.

        Raises:
            ConfigError: ``state`` has a key of its own that is ``"commopt"``.
            CheckpointError: a rank did not come, or could not write its file; nothing else was written.
        """
        if KEY in state:
            raise ConfigError(f"the key {KEY!r} in a checkpoint is for commopt: choose another for what you save.")
        handles = self._models_in(state)
        if not handles or not is_local(path):
            if handles:
                next(iter(handles.values())).engine.say_once(
                    f"{path} is saved without the state of commopt, which lies beside a checkpoint on a local file "
                    "system. After a resume residuals begin at zero.",
                    kind="no sidecar",
                )
            super().save_checkpoint(path, state, *args, **kwargs)
            return
        tree = {key: self._state_of(handle) for key, handle in handles.items()}
        saved = sidecar.save_together(path, tree, None, seconds=PATIENCE)
        super().save_checkpoint(path, state | {KEY: sidecar.reference(saved.save_id)}, *args, **kwargs)
        self.barrier("commopt: the checkpoint is in place")
        sidecar.prune(saved.checkpoint, keep=saved.save_id)
        for handle in handles.values():
            handle.engine.restart_clock()

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Goes on from the state of commopt, too, of the models in ``state``, which have to be set up before.

        Raises:
            CheckpointError: some rank's part cannot be used; raised on every rank.
        """
        remainder: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        handles = self._models_in(state) if isinstance(state, Mapping) else {}
        if handles:
            first = next(iter(handles.values()))
            tree, parts = read_together(first, os.fspath(path), remainder.pop(KEY, None))
            for key, handle in handles.items():
                if tree is not None and key in tree:
                    self._restore(handle, tree[key], parts and [part[key] for part in parts])
        elif KEY in remainder and state:
            warnings.warn(
                f"the state of commopt in {path} is not taken over: call fabric.setup(model) before fabric.load, and "
                "name the model in what is loaded. Residuals begin at zero.",
                CommOptWarning,
                stacklevel=2,
            )
        return remainder

    def teardown(self) -> None:
        """Ends the exchange; what it counted can still be read."""
        for handle in self._handles():
            self._end(handle)
        super().teardown()

    def _handles(self) -> list[Handle]:
        return [handle for _, handle in self._attached]

    def _models_in(self, state: Mapping[str, Any]) -> dict[str, Handle]:
        models = {key: value.module for key, value in state.items() if isinstance(value, DistributedDataParallel)}
        known = {id(module): handle for module, handle in self._attached}
        return {key: known[id(module)] for key, module in models.items() if id(module) in known}

    def _state_of(self, handle: Handle) -> dict[str, Any]:
        watch = self._watches.get(handle)
        return {EXCHANGE: handle.engine.state_dict()} if watch is None else watch.state_dict()

    def _restore(self, handle: Handle, tree: Mapping[str, Any], parts: Sequence[Mapping[str, Any]] | None) -> None:
        watch = self._watches.get(handle)
        if watch is not None and "monitor" in tree:
            watch.load_state_dict(tree, parts)
        else:
            handle.engine.load_state_dict(tree[EXCHANGE], parts and [part[EXCHANGE] for part in parts])
        handle.engine.restart_clock()

    def _end(self, handle: Handle) -> None:
        watch = self._watches.pop(handle, None)
        if watch is not None:
            watch.close()
        handle.close()
