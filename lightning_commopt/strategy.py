"""What makes the DDPStrategy of a Lightning Trainer exchange compressed gradients.

`lightning` and `pytorch_lightning` carry the same classes twice and refuse those of the other. The mixin is for both;
the modules ``lightning`` and ``pytorch_lightning`` beside this file each make a strategy of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel

from commopt import Handle
from lightning_commopt.arguments import Compressing
from lightning_commopt.supervision import Supervised


class CompressedGradients(Compressing, Supervised):
    """Mixin before a ``DDPStrategy`` of the Trainer: attaches commopt to the model that each ``fit`` wraps, on CPU and
    on CUDA. Its arguments are those of `Compressing`."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulates without an exchange. DDP learns a static graph from its first backward, which has to exchange."""
        model, totals = self.model, self.handle and self.handle.stats()
        learns = isinstance(model, DistributedDataParallel) and model.static_graph
        if learns and totals and totals.steps + totals.skipped_steps == 0:
            yield
        else:
            with super().block_backward_sync():
                yield

    def _register_ddp_hooks(self) -> None:  # Lightning's own acts on CUDA only
        assert isinstance(self.model, DistributedDataParallel)
        self.handle = self._attach(self.model, getattr(self.precision_plugin, "scaler", None))
        self.supervisor = None

    def _handles(self) -> list[Handle]:
        return [] if self.handle is None else [self.handle]
