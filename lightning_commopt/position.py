"""Where a fit stands: the progress of Lightning's loops and the place in the data, to be saved and restored."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from commopt.resume.snapshot import RandomState

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class Position:
    """Restores the loops to the end of a batch, which is where a roll-back happens. Make it when the first batch of a
    fit was drawn.

    Args:
        trainer: in a fit.
        tell: called when the progress of batches stays as it is, with the reason.
    """

    def __init__(self, trainer: Any, tell: Callable[[str], None]) -> None:
        self._fit = trainer.fit_loop
        self._reloads = bool(trainer.reload_dataloaders_every_n_epochs)
        self._tell = tell
        # A fit that was resumed within an epoch draws from the beginning of its data, but counts on.
        self._resumed_epoch = self._epoch
        self._resumed_batch = self._fit.epoch_loop.batch_progress.current.ready - 1

    @property
    def _epoch(self) -> int:
        return int(self._fit.epoch_progress.current.processed)

    def state_dict(self) -> dict[str, Any]:
        """Counts, as at the end of a batch. Between drawing the first batch and training on it: at the end of the batch
        that would have come before."""
        loop = self._fit.epoch_loop
        steps = {name: progress.state_dict() for name, progress in self._steps().items()}
        batches = {name: progress.state_dict() for name, progress in self._batches().items()}
        state = {"steps": steps, "batches": batches, "stepped": loop._batches_that_stepped, "begins": False}
        batch = batches["batch"]
        if batch["current"]["started"] < batch["current"]["ready"]:
            for tracker in (batch["current"], batch["total"]):
                tracker["ready"] -= 1
                tracker["completed"] -= 1
            batch["is_last_batch"] = False
            state |= {"stepped": loop._batches_that_stepped - 1, "begins": True}
        return state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Goes back to that batch where its data can be drawn again; otherwise only steps are counted back."""
        loop = self._fit.epoch_loop
        for name, progress in self._steps().items():
            progress.load_state_dict(state["steps"][name])
        loop._batches_that_stepped = state["stepped"]
        reason = self._obstacle(state["batches"]["epoch"]["current"]["processed"])
        if reason:
            self._tell(f"the batches since then are not drawn again, training goes on with those that come: {reason}.")
            return
        for name, progress in self._batches().items():
            progress.load_state_dict(state["batches"][name])
        loop._skip_next_val = state["begins"]  # no batch ended there after which a validation could be due
        self._draw()

    def _steps(self) -> dict[str, Any]:
        loop = self._fit.epoch_loop
        return {
            "optimizer": loop.automatic_optimization.optim_progress,
            "manual": loop.manual_optimization.optim_step_progress,
            "scheduler": loop.scheduler_progress,
        }

    def _batches(self) -> dict[str, Any]:
        loop = self._fit.epoch_loop
        return {"epoch": self._fit.epoch_progress, "batch": loop.batch_progress, "val": loop.val_loop.batch_progress}

    def _obstacle(self, epoch: int) -> str:
        """Why batches of ``epoch`` cannot be drawn again; empty if they can."""
        if not hasattr(self._fit._data_fetcher, "prefetch_batches"):
            return "training_step draws them by itself"
        if self._reloads and epoch != self._epoch:
            return "the data were reloaded since then"
        assert self._fit._combined_loader is not None
        for loader in self._fit._combined_loader.flattened:
            if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
                return "the data are no map-style dataset in a DataLoader"
            if hasattr(loader, "state_dict"):
                return "the DataLoader keeps a state of its own"
            if not all(type(sampler) in (SequentialSampler, DistributedSampler) for sampler in _samplers(loader)):
                return "the sampler's order depends on more than the epoch"
        return ""

    def _draw(self) -> None:
        fetcher, batch = self._fit._data_fetcher, self._fit.epoch_loop.batch_progress
        assert fetcher is not None
        assert self._fit._combined_loader is not None
        for loader in self._fit._combined_loader.flattened:
            for sampler in _samplers(loader):
                if isinstance(sampler, DistributedSampler):
                    sampler.set_epoch(self._epoch)
        before = self._resumed_batch if self._epoch == self._resumed_epoch else 0
        iter(fetcher)
        for _ in range(batch.current.ready - before):
            next(fetcher)
        fetcher.fetched = batch.current.ready  # as the loop counts it
        fetcher.done = fetcher.length is not None and fetcher.fetched >= fetcher.length


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    batches = loader.batch_sampler
    return [loader.sampler if batches is None else getattr(batches, "sampler", batches)]


class Weights:
    """A model's state, loaded as strictly as the model asks for."""

    def __init__(self, module: "LightningModule") -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """The model's own."""
        return self._module.state_dict()

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Into the model."""
        self._module.load_state_dict(state, strict=self._module.strict_loading)


class Generators(RandomState):
    """The random generators, of which the first state that is asked for is that when this was made: a snapshot is taken
    when the first batch was drawn already, and has to lie before it."""

    def __init__(self) -> None:
        self._first: dict[str, Any] | None = super().state_dict()

    def state_dict(self) -> dict[str, Any]:
        """As of ``RandomState``."""
        first, self._first = self._first, None
        return super().state_dict() if first is None else first
