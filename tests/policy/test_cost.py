"""The model of a step: played by hand, and what it says of plans on made-up networks."""

import dataclasses

import pytest
import torch

from commopt.compressors import RowCompressor, create
from commopt.plan import Plan
from commopt.policy.cost import VOTE, Journey, Stage, Workload, play, predict
from tests.policy.tables import machine, network, workload

NONE = Plan.uncompressed()
INT8 = Plan(create("int8"), feedback=False)
INT4 = Plan(create("int4"), feedback=True)


def journey(ready: float, **stages: float) -> Journey:
    """Stages by name: those that begin with ``wire`` are on the wire."""
    return Journey(ready, tuple(Stage(name.startswith("wire"), seconds) for name, seconds in stages.items()), 0.0)


def ends(journeys: list[Journey], compute: float, steal: float = 0.0, cpu_share: float = 0.0) -> tuple[float, float]:
    end, computed = play(journeys, compute, steal, cpu_share)
    return round(end, 9), round(computed, 9)


def int8_bytes(numel: int) -> int:
    assert isinstance(INT8.compressor, RowCompressor)
    assert numel % INT8.compressor.block == 0
    return numel // INT8.compressor.block * INT8.compressor.row_bytes


def test_what_is_ready_at_the_end_is_all_exposed() -> None:
    assert ends([journey(1.0, codec=0.1, wire=0.5, codec2=0.2)], compute=1.0) == (1.8, 1.0)


def test_what_is_ready_early_hides_behind_backward() -> None:
    assert ends([journey(0.0, codec=0.1, wire=0.5, codec2=0.2)], compute=2.0) == (2.0, 2.0)
    assert ends([journey(1.5, codec=0.1, wire=0.5, codec2=0.2)], compute=2.0) == (2.3, 2.0)


def test_without_messages_there_is_only_backward() -> None:
    assert ends([], compute=2.0, steal=1.0) == (2.0, 2.0)


def test_a_codec_on_the_same_core_takes_its_time_from_backward() -> None:
    hidden = journey(0.0, codec=1.0)
    assert ends([hidden], compute=2.0, steal=0.0) == (2.0, 2.0)
    assert ends([hidden], compute=2.0, steal=1.0) == (3.0, 3.0)  # three seconds of work on one core
    # Both at 2/3: after 1.5 s the codec is done, and 1 s of backward is left.
    assert ends([hidden], compute=2.0, steal=0.5) == (2.5, 2.5)


def test_two_codecs_on_the_same_core_take_turns() -> None:
    both = [journey(0.0, codec=1.0), journey(0.0, codec=1.0)]
    assert ends(both, compute=0.0, steal=0.0)[0] == 1.0
    assert ends(both, compute=0.0, steal=1.0)[0] == 2.0


def test_a_wire_that_is_made_of_cores_takes_its_share() -> None:
    # Both at 2/3: the wire's second takes 1.5 s, and 1 s of backward is left.
    assert ends([journey(0.0, wire=1.0)], compute=2.0, steal=1.0, cpu_share=0.5) == (2.5, 2.5)
    assert ends([journey(0.0, wire=1.0)], compute=2.0, steal=1.0, cpu_share=0.0) == (2.0, 2.0)


def test_a_message_is_ready_when_so_much_of_backward_is_done() -> None:
    # The first codec slows backward down to half, so that the second message is ready after 2 s.
    journeys = [journey(0.0, codec=1.0, wire=0.0), journey(1.0, wire=1.0)]
    assert ends(journeys, compute=1.0, steal=1.0) == (3.0, 2.0)


def test_the_wire_is_had_in_order() -> None:
    # The second one's payload is ready at 0.1, and has the wire from 2 on.
    assert ends([journey(0.0, codec=1.0, wire=1.0), journey(0.0, codec=0.1, wire=1.0)], compute=0.0)[0] == 3.0


def test_two_messages_are_under_way_at_a_time() -> None:
    journeys = [
        journey(0.0, codec=1.0, wire=1.0, codec2=2.0),  # done at 4
        journey(0.0, codec=0.1, wire=1.0),  # done at 3
        journey(0.0, codec=1.0, wire=1.0),  # on the lane of the first one: from 4 to 6
    ]
    assert ends(journeys, compute=0.0)[0] == 6.0
    assert ends(journeys[:2], compute=0.0)[0] == 4.0


def test_a_message_of_two_stages_keeps_the_wire_between_them() -> None:
    journeys = [journey(0.0, wire=1.0, codec=1.0, wire2=1.0), journey(0.0, codec=0.5, wire=1.0)]
    assert ends(journeys, compute=0.0)[0] == 4.0
    assert ends([journey(0.0, wire=2.0, codec=1.0), journeys[1]], compute=0.0)[0] == 3.0  # but not after its last one


def test_one_message_takes_what_the_curve_says() -> None:
    net = network(bandwidth=1e7, latency=0.001)
    work = workload(1, (256, 256))
    vote = net.collectives["all_reduce"].seconds((VOTE + 2) * 8)
    none = predict(NONE, work, net, machine())
    assert none.nbytes == 256 * 256 * 4
    assert none.wire == pytest.approx(net.collectives["all_reduce"].seconds(256 * 256 * 4) + vote)

    payload = int8_bytes(256 * 256)
    int8 = predict(INT8, work, net, machine())
    assert int8.nbytes == payload
    assert int8.wire == pytest.approx(net.collectives["all_gather"].seconds(payload) + vote)


def test_two_shots_are_both_on_the_wire() -> None:
    net = network(bandwidth=1e7, latency=0.001, world=4)
    work = workload(1, (256, 256))
    payload = int8_bytes(256 * 256)
    shots = net.collectives["all_to_all"].seconds(payload) + net.collectives["all_gather"].seconds(payload / 4)
    vote = net.collectives["all_reduce"].seconds((VOTE + 4) * 8)
    assert predict(INT8, work, net, machine()).wire == pytest.approx(shots + vote)


@pytest.mark.parametrize("plan", [NONE, INT8, INT4, Plan(create("powersgd"), True, message_bytes=1 << 18)], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_a_slower_network_is_never_faster(plan: Plan, world: int) -> None:
    work = workload(8, (256, 128))
    steps = [predict(plan, work, network(1e9, world=world).scaled(0.25 * 1.5**k), machine()).step for k in range(30)]
    assert steps == sorted(steps)
    assert steps[-1] > 5 * steps[0]


@pytest.mark.parametrize("world", [2, 4])
def test_on_an_infinite_network_there_is_only_the_computation(world: int) -> None:
    work = workload(8, (256, 128), backward=0.5, tail=0.1)
    free = predict(NONE, work, network(1e18, latency=1e-12, world=world), machine(rate=1e12))
    assert work.compute == pytest.approx(0.6)
    assert work.compute <= free.step <= 1.002 * work.compute
    assert free.exposed < 0.001


def test_exposed_is_what_comes_after_backward() -> None:
    work = workload(4, (512, 512), backward=0.1, tail=0.05)  # 4 MiB, 0.42 s at 10 MB/s
    seen = predict(NONE, work, network(1e7), machine())
    assert seen.step == pytest.approx(0.1 + seen.exposed + 0.05)
    assert seen.wire == pytest.approx(0.42, rel=0.01)
    # The first quarter is ready at 0.025: the wire is busy from there on.
    assert seen.exposed == pytest.approx(0.025 + 0.42 - 0.1, abs=0.01)


def test_what_codecs_take_is_seen() -> None:
    work = workload(4, (512, 512), backward=0.1)
    alone, shared = (predict(INT8, work, network(1e10), machine(2e7, steal)) for steal in (0.0, 1.0))
    assert alone.codec == shared.codec > 0.1
    assert shared.step > alone.step + 0.05


@pytest.mark.parametrize(("world", "passes"), [(2, 2), (3, 3)])
def test_what_keeping_residuals_takes_is_seen(world: int, passes: int) -> None:
    work, net = workload(1, (768, 512)), network(1e10, world=world)
    without, kept = (
        predict(dataclasses.replace(INT8, feedback=keep), work, net, machine(1e8)) for keep in (False, True)
    )
    # Both copy into rows and back; two ranks decode what they sent anyway, three once more.
    assert kept.codec - without.codec == pytest.approx(passes * 768 * 512 / 1e8, rel=0.01)


def test_a_round_of_powersgd_waits_for_the_one_before() -> None:
    net = network(1e12, latency=0.1)
    one = predict(Plan(create("powersgd"), True), workload(1, (512, 512)), net, machine())
    assert one.wire == pytest.approx(3 * 0.1, rel=0.01)  # two rounds and the vote


def test_fused_messages_pay_latency_once() -> None:
    net, work = network(1e12, latency=0.01), workload(16, (64, 64), backward=0.001)
    single, fused = (
        predict(dataclasses.replace(NONE, message_bytes=size), work, net, machine()) for size in (1, 1 << 26)
    )
    assert single.wire == pytest.approx(17 * 0.01, rel=0.01)
    assert fused.wire == pytest.approx(2 * 0.01, rel=0.01)
    assert fused.nbytes == single.nbytes


def test_a_workload_knows_its_size() -> None:
    work: Workload = workload(3, (10, 7), tensors=2)
    assert work.nbytes == 3 * 2 * 70 * 4
    assert [bucket.last for bucket in work.buckets] == [False, False, True]
    assert all(bucket.buffer.device == torch.device("meta") for bucket in work.buckets)
