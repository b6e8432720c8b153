"""Residuals: staged, then final or never."""

import torch

from commopt.feedback import Residuals
from commopt.layout import Layout

CPU = torch.device("cpu")
SHAPES = {"a": torch.Size([3, 2]), "b": torch.Size([5])}


def layout(*names: str) -> Layout:
    return Layout(list(names), [SHAPES[name] for name in names], block=4)


def put(residuals: Residuals, where: Layout, value: float) -> None:
    slot = residuals.slot(where)
    slot.back.fill_(value)
    residuals.stage(slot)


def values(residuals: Residuals) -> dict[str, set[float]]:
    final = residuals.final()
    assert {name: residual.shape for name, residual in final.items()} == SHAPES
    return {name: set(residual.flatten().tolist()) for name, residual in final.items()}


def test_they_begin_as_zeros_of_every_parameter() -> None:
    assert values(Residuals(SHAPES, CPU)) == {"a": {0.0}, "b": {0.0}}
    assert Residuals({}, CPU).final() == {}


def test_staged_is_not_final() -> None:
    residuals, both = Residuals(SHAPES, CPU), layout("a", "b")
    put(residuals, both, 1.0)
    assert values(residuals) == {"a": {0.0}, "b": {0.0}}
    residuals.commit()
    assert values(residuals) == {"a": {1.0}, "b": {1.0}}
    put(residuals, both, 2.0)
    residuals.discard()
    residuals.commit()
    assert values(residuals) == {"a": {1.0}, "b": {1.0}}
    assert set(residuals.slot(both).front.flatten().tolist()) == {1.0}


def test_they_move_by_name_when_buckets_are_regathered() -> None:
    residuals, both, one, other = Residuals(SHAPES, CPU), layout("a", "b"), layout("b"), layout("a")
    put(residuals, both, 1.0)
    residuals.commit()
    put(residuals, one, 2.0)
    residuals.commit()
    assert values(residuals) == {"a": {1.0}, "b": {2.0}}
    put(residuals, other, 3.0)
    residuals.commit()
    assert values(residuals) == {"a": {3.0}, "b": {2.0}}
    again = layout("a", "b")
    slot = residuals.slot(again)
    assert [set(view.flatten().tolist()) for view in again.views(slot.front)] == [{3.0}, {2.0}]
    assert len(residuals._slots) == 1  # what held them before was let go


def test_they_follow_a_loss_scale() -> None:
    residuals, both = Residuals(SHAPES, CPU), layout("a", "b")
    put(residuals, both, 3.0)
    residuals.commit()
    residuals.scale_(0.5)
    assert values(residuals) == {"a": {1.5}, "b": {1.5}}
