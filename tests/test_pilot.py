"""The pilot in training: what it measures is made up here, and what it does is seen on all ranks."""

import math
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
import commopt.pilot
from commopt.collectives.wire import Wire, WireError
from commopt.config import CommOptConfig
from commopt.errors import ConfigError, ExchangeError, MismatchError
from commopt.pilot import EVERY, FIRST, WARM_UP
from commopt.plan import Plan
from tests.engine.steps import same_on_all_ranks
from tests.flights import Flight, made_up, train
from tests.hooks.training import MLP, SMALL_BUCKETS, attached
from tests.workers import Workers

SLOW, FAST = 1e3, 1e12  # bytes/s; `MLP` has 40 kB of gradients, and computes for some milliseconds
NONE = repr(Plan.uncompressed())
SECOND = FIRST + EVERY  # steps until the second look
LOOKS = [FIRST + look * EVERY for look in range(4)]


def fly(
    rank: int,
    world: int,
    bandwidth: float,
    steps: int,
    quality: Any = "safe",
    limit: float = 0.0,
    rates: tuple[float, ...] = (),
    wires: tuple[float, float, int] = (0.002, 0.002, 0),
    looking: float = math.inf,
) -> Flight:
    def wire(step: int) -> float:
        before, after, since = wires
        return before if step < since else after

    with made_up(bandwidth, limit, wire, looking=looking) as flight:
        model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
        with attached(model, "auto", quality=quality) as handle:
            train(handle, model, rank, steps, flight, rates[rank] if rates else 1e-4)
            if not rates:
                assert same_on_all_ranks(model.parameters())
            assert handle.stats().steps == steps
    return flight


def test_on_a_slow_link_it_compresses_gently_and_then_more(workers: Workers) -> None:
    one, other = workers.run(fly, 2, bandwidth=SLOW, steps=LOOKS[2] + 6)
    assert one.plans == other.plans
    assert one.names[0] == "none"  # before ranks have voted on anything
    assert set(one.names[1:WARM_UP]) == {"int4"}
    assert set(one.names[-4:]) == {"int3"}
    assert (one.probes, other.probes) == (1, 1)
    assert one.told == other.told
    assert one.explained == other.explained


def test_where_a_decision_takes_long_it_looks_less_often(workers: Workers) -> None:
    one, other = workers.run(fly, 2, bandwidth=SLOW, steps=LOOKS[2] + 6, looking=1e-9)
    assert one.plans == other.plans
    assert set(one.names[1:]) == {"int4"}  # the one look was within the warm-up


def test_it_says_what_it_does_and_why(workers: Workers) -> None:
    for flight in workers.run(fly, 2, bandwidth=SLOW, steps=LOOKS[2] + 1):
        step, reason = flight.told[-1]
        assert reason == flight.explained[-1]
        assert reason.startswith("int3")
        assert "ms a step predicted, uncompressed" in reason
        assert flight.logged[-1] == f"step {step}: {reason}"
        assert step == LOOKS[2] - 1
        assert flight.logged[0].endswith("first steps, of what the network alone lets expect: int4")
        assert "warm-up" in flight.explained[SECOND]
        assert "warm-up" not in reason


@pytest.mark.parametrize("quality", ["safe", "aggressive"])
def test_on_a_fast_link_nothing_changes(workers: Workers, quality: str) -> None:
    for flight in workers.run(fly, 2, bandwidth=FAST, steps=LOOKS[2] + 2, quality=quality):
        assert set(flight.plans) == {NONE}
        assert not flight.told
        assert not flight.logged
        assert flight.explained[-1].startswith("do nothing: uncompressed")


def test_lossless_is_kept_on_the_slowest_link(workers: Workers) -> None:
    for flight in workers.run(fly, 2, bandwidth=SLOW / 100, steps=LOOKS[2] + 2, quality="lossless"):
        assert set(flight.names) == {"none"}


def test_a_link_that_becomes_slower_is_believed_at_the_second_look(workers: Workers) -> None:
    flights = workers.run(fly, 2, bandwidth=FAST, steps=LOOKS[3] + 1, quality="lossless", wires=(0.002, 0.004, FIRST))
    for flight in flights:
        # The look is at the end of the exchange of its step.
        assert set(flight.factors[: LOOKS[2] - 1]) == {1.0}
        assert flight.factors[LOOKS[2] :] == [pytest.approx(2.0)] * (LOOKS[3] + 1 - LOOKS[2])
        assert "the link takes 2.00 times what it took at first" in flight.explained[LOOKS[2]]
        assert "the link takes" not in flight.explained[LOOKS[2] - 2]
    assert flights[0].factors == flights[1].factors


def test_a_hiccup_of_the_link_is_not(workers: Workers) -> None:
    (flight, _) = workers.run(fly, 2, bandwidth=FAST, steps=LOOKS[3], quality="lossless", wires=(0.002, 0.0025, FIRST))
    assert set(flight.factors) == {1.0}


def test_ranks_of_other_learning_rates_plan_the_same(workers: Workers) -> None:
    one, other = workers.run(fly, 2, bandwidth=SLOW, steps=LOOKS[2] + 4, rates=(1e-4, 1e-6))
    assert one.plans == other.plans
    assert set(one.names[-2:]) == {"int3"}


def moving_rate(rank: int, world: int) -> list[str]:
    """Rank 0 lowers its learning rate just before the warm-up ends."""
    with made_up(SLOW) as flight:
        model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
        with attached(model, "auto") as handle:
            train(handle, model, rank, WARM_UP - 2, flight, rate=1e-4)
            train(handle, model, rank, LOOKS[2] + 4 - (WARM_UP - 2), flight, rate=1e-4 if rank else 1e-5)
    return [*flight.names, flight.explained[-1]]


def test_while_the_gradient_may_change_plans_stay_gentle(workers: Workers) -> None:
    one, other = workers.run(moving_rate, 2)
    assert one == other
    assert set(one[1:-1]) == {"int4"}
    assert "the gradient changes fast" in one[-1]


def small_model(rank: int, world: int) -> int:
    with made_up(SLOW, limit=math.inf) as flight, pytest.MonkeyPatch.context() as patch:
        patch.setattr(commopt.pilot, "MATTERS", 1.0)  # nothing is worth measuring, however long the wait
        model = DDP(MLP())
        with attached(model, "auto") as handle:
            train(handle, model, rank, SECOND + 1, flight)
            assert "do nothing" in flight.explained[-1]
            assert "of a step is exposed communication" in flight.explained[-1]
    return flight.probes


def test_what_cannot_matter_is_not_measured(workers: Workers) -> None:
    assert workers.run(small_model, 2) == [0, 0]


def alone(rank: int, world: int) -> Flight:
    with made_up(SLOW) as flight:
        model = DDP(MLP())
        with attached(model, "auto") as handle:
            train(handle, model, rank, SECOND + 1, flight)
            assert handle.stats().bytes_sent == 0.0
            assert handle.explain() == "do nothing: one process exchanges nothing"
    return flight


def test_a_single_rank_needs_no_probe(workers: Workers) -> None:
    (flight,) = workers.run(alone, 1)
    assert flight.probes == 0
    assert set(flight.plans) == {NONE}


@pytest.mark.parametrize("given", [{"options": {"rank": 4}}, {"error_feedback": True}, {"error_feedback": False}])
def test_auto_chooses_options_itself(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave them out, or name a compressor"):
        CommOptConfig("auto", **given)
    with pytest.raises(ConfigError, match="leave them out, or name a compressor"):
        commopt.attach(None, "auto", **given)  # type: ignore[arg-type]


def test_a_typo_in_the_quality_names_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="one of lossless, safe, aggressive, got 'save'"):
        commopt.attach(None, quality="save")  # type: ignore[arg-type]


def other_quality(rank: int, world: int) -> None:
    with (
        made_up(FAST),
        pytest.raises(MismatchError, match="auto, quality safe on rank 0; auto, quality aggressive on rank 1"),
    ):
        commopt.attach(DDP(MLP()), quality="aggressive" if rank else "safe", timeout=20)


def test_ranks_of_different_quality_do_not_begin(workers: Workers) -> None:
    workers.run(other_quality, 2)


def broken_probe(rank: int, world: int, at_once: bool) -> str:
    """Rank 1 loses its peers in the probe, while rank 0 waits for it."""

    def probe(wire: Wire, device: torch.device) -> Any:
        if rank == 1:
            raise WireError("the cable is out")
        wire.all_reduce(torch.zeros(1))

    with made_up(SLOW, limit=0.0 if at_once else math.inf) as flight, pytest.MonkeyPatch.context() as patch:
        patch.setattr(commopt.pilot, "network_of", probe)
        handle = None
        try:
            model = DDP(MLP())
            handle = commopt.attach(model, timeout=2.0)
            train(handle, model, rank, FIRST + 1, flight)
        except ExchangeError as error:
            assert len(flight.plans) == (0 if at_once else FIRST - 1)
            return str(error)
        finally:
            if handle is not None:
                handle.close()
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("at_once", [True, False], ids=["in attach", "in training"])
def test_who_loses_its_peers_in_the_probe_says_so_on_all_ranks(workers: Workers, at_once: bool) -> None:
    one, other = workers.run(broken_probe, 2, at_once=at_once)
    assert "the cable is out" in other
    assert "Look" in one  # and where
    assert "Look" in other
    assert one


def broken_policy(rank: int, world: int) -> tuple[Flight, int]:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("of a table with a hole")

    with made_up(FAST) as flight, pytest.MonkeyPatch.context() as patch:
        patch.setattr(commopt.pilot, "choose", fails)
        model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
        with attached(model, "auto") as handle:
            train(handle, model, rank, SECOND + 2, flight)
    return flight, len(flight.logged)


def test_a_policy_that_fails_leaves_the_plan(workers: Workers) -> None:
    for flight, logged in workers.run(broken_policy, 2):
        assert set(flight.plans) == {NONE}
        assert "the plan stays as it is" in flight.explained[-1]
        assert "ZeroDivisionError: of a table with a hole" in flight.explained[-1]
        assert logged == 1
