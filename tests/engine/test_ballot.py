"""One vector, reduced by MAX, decides for all."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commopt.engine.ballot import Failure, Result, Wish, decode, encode

Rank = tuple[Failure, Wish, float, float]


def vote(
    ranks: list[Rank],
    steps: list[int] | None = None,
    checksums: list[int] | None = None,
    owes: list[bool] | None = None,
) -> Result:
    """What the ranks decide: failure, wish, gradient norm and loss of each."""
    ballots = [
        encode(
            failure,
            wish,
            owes[rank] if owes else False,
            (steps[rank] if steps else 3, 77, torch.tensor(checksums[rank] if checksums else 5)),
            torch.tensor(norm),
            torch.tensor(loss),
            rank,
            len(ranks),
        )
        for rank, (failure, wish, norm, loss) in enumerate(ranks)
    ]
    return decode(torch.stack(ballots).amax(0).tolist())


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, width=32, allow_nan=False, allow_infinity=False)
rank = st.tuples(st.sampled_from(Failure), st.sampled_from(Wish), positive, finite)


@given(st.lists(rank, min_size=1, max_size=8))
def test_the_gravest_word_counts_and_losses_are_averaged(ranks: list[Rank]) -> None:
    failures, wishes, norms, losses = zip(*ranks, strict=True)
    result = vote(ranks)
    assert (result.failure, result.wish) == (max(failures), max(wishes))
    assert result.gradient_norm == max(norms)
    assert result.finite
    assert result.loss == pytest.approx(math.fsum(losses) / len(losses))
    assert result.disputed == ()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_one_rank_that_is_not_finite_is_enough(bad: float) -> None:
    quiet = (Failure.NONE, Wish.NONE, 1.0, 2.0)
    assert vote([quiet, quiet]).finite
    assert not vote([quiet, (Failure.NONE, Wish.NONE, bad, 2.0)]).finite


def test_a_loss_that_nobody_told_is_none_and_one_of_two_counts_alone() -> None:
    silent = (Failure.NONE, Wish.NONE, 1.0, math.nan)
    assert vote([silent, silent]).loss is None
    assert vote([silent, (Failure.NONE, Wish.NONE, 1.0, -4.5)]).loss == -4.5


def test_residuals_that_wait_on_one_rank_wait() -> None:
    quiet = (Failure.NONE, Wish.NONE, 1.0, 2.0)
    assert not vote([quiet, quiet], owes=[False, False]).owed
    assert vote([quiet, quiet], owes=[False, True]).owed


def test_what_ranks_do_not_agree_on_is_named() -> None:
    quiet = (Failure.NONE, Wish.NONE, 1.0, 2.0)
    assert vote([quiet, quiet], steps=[3, 4]).disputed == ("step",)
    assert vote([quiet, quiet, quiet], checksums=[-9, -9, 1 << 40]).disputed == ("checksum",)
    assert vote([quiet, quiet], checksums=[-9, -9]).disputed == ()
