"""Error feedback: what compression lost, kept by parameter name and added to the next contribution.

Residuals are *staged* while a step runs and become final when it is committed, so that a step that is skipped leaves
them as they were. Between two steps ``contribution == delivered + residual`` telescopes: the sum of all that was
delivered differs from the sum of all gradients by the last residual alone (Karimireddy et al. 2019, eq. 6).
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from commopt.layout import Layout


class Slot:
    """Two ``[rows, block]`` float32 buffers of one message: ``front`` is committed, ``back`` is being staged."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.front = torch.zeros(layout.rows, layout.block, device=device)
        self.back = torch.zeros_like(self.front)


class Residuals:
    """The residuals of one model on one rank: one float32 tensor a parameter, allocated at once, with the same keys on
    every rank, and a second one while a step is staged (8 bytes a parameter in all).

    Args:
        shapes: the shape of each parameter, by name.
        device: where gradients are.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        self._device = device
        self._final: dict[str, Tensor] = {
            name: torch.zeros(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()
        }
        self._slots: dict[tuple[str, ...], Slot] = {}
        self._staged: list[Slot] = []
        self._moving = threading.Lock()

    def slot(self, layout: Layout) -> Slot:
        """The buffers of a message. What is sent together may change from step to step: residuals then move by name."""
        slot = self._slots.get(layout.names)
        if slot is None or slot.layout is not layout:
            with self._moving:
                slot = self._move(layout)
        return slot

    def _move(self, layout: Layout) -> Slot:
        names = set(layout.names)
        for key in [key for key in self._slots if not names.isdisjoint(key)]:
            del self._slots[key]
            for name in set(key) - names:  # or its view would hold the whole buffer
                self._final[name] = self._final[name].clone()
        slot = self._slots[layout.names] = Slot(layout, self._device)
        for name, view in zip(layout.names, layout.views(slot.front), strict=True):
            if name in self._final:  # not if it was frozen after DDP had wrapped the model
                view.copy_(self._final[name])
            self._final[name] = view
        return slot

    def stage(self, slot: Slot) -> None:
        """``slot.back`` holds the residuals that follow if this step is committed."""
        self._staged.append(slot)

    def commit(self) -> None:
        """What was staged becomes final."""
        for slot in self._staged:
            slot.front, slot.back = slot.back, slot.front
            self._final.update(zip(slot.layout.names, slot.layout.views(slot.front), strict=True))
        self._staged.clear()

    def discard(self) -> None:
        """What was staged never happened."""
        self._staged.clear()

    def scale_(self, factor: float) -> None:
        """Follows a loss scale that changed by ``factor``: residuals are in units of the scaled gradient."""
        for residual in self._final.values():
            residual.mul_(factor)

    def load(self, residuals: Mapping[str, Tensor]) -> None:
        """Goes on from residuals of the same shapes; those that are not given become zero."""
        for own in self._final.values():
            own.zero_()
        for name, residual in residuals.items():
            if name in self._final:
                self._final[name].copy_(residual)
            else:
                self._final[name] = residual.to(self._device, copy=True)

    def final(self) -> dict[str, Tensor]:
        """The committed residuals by parameter name, in each parameter's shape, float32; views, not copies."""
        return dict(self._final)
