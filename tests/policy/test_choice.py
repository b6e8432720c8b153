"""What is chosen on which network, and that it does not waver."""

import dataclasses
import re

import pytest

from commopt.compressors import Compressor, create
from commopt.config import Quality
from commopt.plan import Plan
from commopt.policy.choice import AGGRESSIVE, GENTLE, SAFE, Choice, allowed, choose, cold_start
from commopt.policy.cost import Prediction, predict
from tests.policy.tables import machine, network, workload

NONE = Plan.uncompressed()
SLOW, FAST = network(12.5e6), network(1e10)  # 100 Mbit/s, and 80 Gbit/s
WORK = workload(4, (1024, 1024), backward=0.2, tail=0.1)  # 16 MiB
SMALLEST = {"int3", "int4"}


def chosen(
    compressors: tuple[Compressor, ...],
    current: Plan = NONE,
    experience: dict[Compressor, float] | None = None,
) -> Choice:
    return choose(current, compressors, WORK, SLOW, machine(), experience)


def of(choice: Choice, name: str) -> Prediction:
    return next(seen for seen in choice.looked_at if seen.plan.compressor.name == name)


def test_a_slow_link_gets_few_bits() -> None:
    best = chosen(allowed("safe")).best
    assert best.plan.compressor.name in SMALLEST
    assert best.plan.feedback
    assert best.plan.small is None  # one message a bucket
    assert best.step < 0.5 * chosen(()).best.step


@pytest.mark.parametrize(("tensors", "small"), [(4, None), (10_000, NONE)])
def test_vectors_that_would_be_padding_travel_whole(tensors: int, small: Plan | None) -> None:
    vectors = workload(1, (1,), backward=0.1, kind="small", tensors=tensors)
    (part,) = vectors.ready
    names = tuple(f"vector{name}" for name in part.names)
    work = dataclasses.replace(
        WORK,
        ready=(dataclasses.replace(part, names=names), *WORK.ready),
        classes={**WORK.classes, **dict.fromkeys(names, "small")},
    )
    best = choose(NONE, (create("int4"),), work, SLOW, machine()).best.plan
    assert best.compressor == create("int4")
    assert best.small == small


def test_what_may_cost_accuracy_has_to_be_asked_for() -> None:
    wild = {compressor.name for compressor in AGGRESSIVE}
    assert wild == {"powersgd", "onebit", "int2"}
    assert not wild & {compressor.name for compressor in allowed("safe")}
    slow = choose(NONE, allowed("aggressive"), WORK, network(1.25e6), machine())
    assert slow.best.plan.compressor.name in wild
    assert re.search(r"\(and \d\.\d times the steps to the same loss\)", slow.reason)


def test_fewer_bytes_have_to_make_up_for_more_steps() -> None:
    choice = chosen(allowed("aggressive"))
    shortest = min(choice.looked_at, key=lambda seen: seen.step)
    assert AGGRESSIVE[shortest.plan.compressor] > 1
    assert choice.best.plan.compressor in allowed("safe")
    assert choice.best.step < AGGRESSIVE[shortest.plan.compressor] * shortest.step


@pytest.mark.parametrize("quality", ["lossless", "safe", "aggressive"])
def test_on_a_fast_link_nothing_is_done(quality: Quality) -> None:
    choice = choose(NONE, allowed(quality), WORK, FAST, machine())
    assert choice.best.plan == NONE
    assert choice.reason.startswith("do nothing: uncompressed")


def test_lossless_never_compresses() -> None:
    assert allowed("lossless") == allowed("lossless", gentle=True) == ()
    choice = choose(Plan(create("int4"), True), allowed("lossless"), WORK, SLOW, machine())
    assert choice.best.plan.lossless
    assert {seen.plan.compressor.name for seen in choice.looked_at} == {"none"}


@pytest.mark.parametrize("quality", ["safe", "aggressive"])
def test_gentle_plans_have_four_bits_and_more(quality: Quality) -> None:
    assert {compressor.name for compressor in allowed(quality, gentle=True)} == {"bf16", "int8", "int4"}
    assert {compressor.name for compressor in allowed(quality)} >= {"bf16", "fp8", "int8", "int4", "int3"}
    assert chosen(allowed(quality, gentle=True)).best.plan.compressor.name == "int4"
    # What is in use and not allowed any more is left.
    wild = choose(NONE, allowed(quality), WORK, network(1.25e6), machine()).best.plan
    assert wild.compressor not in allowed(quality, gentle=True)
    assert chosen(allowed(quality, gentle=True), wild).best.plan.compressor.name == "int4"


def biased(current: Plan, target: str, factor: float) -> Choice:
    """Experience makes ``target`` take ``factor`` times what the best of the others takes."""
    first = chosen(allowed("safe"))
    least = min(seen.step for seen in first.looked_at if seen.plan.compressor.name != target)
    here = first.uncompressed if target == "none" else of(first, target)
    known = dict.fromkeys((NONE.compressor, *GENTLE, *SAFE), 1.0)
    known[here.plan.compressor] = factor * least / here.step
    return chosen(allowed("safe"), current, known)


def test_what_is_in_use_stays_while_it_is_nearly_as_fast() -> None:
    current = of(chosen(allowed("safe")), "int8").plan
    assert biased(current, "int8", 1 / 0.98).best.plan == current
    assert biased(current, "int8", 1 / 0.96).best.plan.compressor.name in SMALLEST
    assert biased(NONE, "int8", 1 / 0.98).best.plan.compressor.name in SMALLEST  # not in use: no reason to take it


def test_compressing_has_to_save_more_than_a_little() -> None:
    compressed = of(chosen(allowed("safe")), "int4").plan
    for current, too_little, enough in ((NONE, 0.04, 0.06), (compressed, 0.01, 0.03)):  # what is in use stays longer
        assert biased(current, "none", 1 / (1 - too_little)).best.plan == NONE
        assert biased(current, "none", 1 / (1 - enough)).best.plan.compressor.name in SMALLEST


def test_experience_corrects_what_was_predicted() -> None:
    first = chosen(allowed("safe"))
    bad = {seen.plan.compressor: 10.0 if seen.plan.compressor.name in SMALLEST else 1.0 for seen in first.looked_at}
    corrected = chosen(allowed("safe"), experience=bad)
    assert corrected.best.plan.compressor.name in {"int8", "fp8"}
    assert of(corrected, "int4").step == pytest.approx(10 * of(first, "int4").step)


def test_what_was_never_in_use_is_expected_to_do_as_well_as_the_best() -> None:
    first = chosen(allowed("safe"))
    known: dict[Compressor, float] = {create("int8"): 1.5, create("bf16"): 7.0}
    for plain in (0.5, 2.0):  # which says nothing about compressors
        corrected = chosen(allowed("safe"), experience={**known, NONE.compressor: plain})
        assert of(corrected, "int4").step == pytest.approx(1.5 * of(first, "int4").step)
        assert corrected.uncompressed.step == pytest.approx(plain * first.uncompressed.step)
    corrected = chosen(allowed("safe"), experience={NONE.compressor: 1.2})  # and yet more than nothing does
    assert of(corrected, "int4").step == pytest.approx(1.2 * of(first, "int4").step)


def test_what_comes_close_is_tried_once() -> None:
    int8, fp8 = create("int8"), create("fp8")  # predicted to be as fast as each other
    plans = {seen.plan.compressor: seen.plan for seen in chosen((int8, fp8)).looked_at}

    def after(current: Plan, experience: dict[Compressor, float]) -> Plan:
        return chosen((int8, fp8, create("bf16")), current, experience).best.plan

    assert after(plans[int8], {}) == plans[int8]  # no step was measured yet
    assert after(plans[int8], {int8: 1.0}) == plans[fp8]  # and not bf16, which is far slower
    assert after(plans[fp8], {int8: 1.0, fp8: 1.02}) == plans[fp8]
    assert after(plans[fp8], {int8: 1.0, fp8: 1.05}) == plans[int8]
    assert after(plans[int8], {int8: 1.0, fp8: 1.05}) == plans[int8]
    assert "it is tried, for int8" in chosen((int8, fp8), plans[int8], {int8: 1.0}).reason


def test_what_is_tried_has_to_save_as_much_as_anything_else() -> None:
    int8, fp8 = create("int8"), create("fp8")
    plan = {seen.plan.compressor: seen.plan for seen in chosen((int8, fp8)).looked_at}[int8]
    first = chosen((int8, fp8), plan, {int8: 1.0})
    for saves, tried in ((0.01, False), (0.05, True)):
        plain = of(first, "fp8").step / (1 - saves) / first.uncompressed.step
        best = chosen((int8, fp8), plan, {int8: 1.0, NONE.compressor: plain}).best.plan
        assert (best.compressor == fp8) is tried


def milliseconds(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"(\d+) ms", text)]


def test_the_reason_has_the_figures_of_a_plan_that_was_chosen() -> None:
    choice = chosen(allowed("safe"))
    best, second = choice.looked_at[:2]
    figures = [round(1000 * seen.step) for seen in (best, choice.uncompressed, second)]
    assert milliseconds(choice.reason) == figures
    assert choice.reason.startswith(best.plan.compressor.name)
    assert f"next {second.plan.compressor.name}" in choice.reason
    exposed = choice.uncompressed.exposed / choice.uncompressed.step
    assert f"{exposed:.0%} of it exposed communication" in choice.reason


def test_the_reason_has_the_figures_of_doing_nothing() -> None:
    choice = choose(NONE, allowed("safe"), WORK, FAST, machine())
    assert milliseconds(choice.reason)[0] == round(1000 * choice.uncompressed.step)
    assert re.search(r"would save \d+%", choice.reason)


def test_many_small_tensors_on_a_link_of_high_latency_travel_together() -> None:
    work = workload(200, (64, 64), backward=0.1)  # buckets of 16 KiB
    best = choose(NONE, allowed("safe"), work, network(1e9, latency=0.01), machine()).best
    assert best.plan.message_bytes is not None
    assert best.plan.message_bytes >= 1 << 20
    assert best.step < 0.3 * choose(NONE, (), work, network(1e9, latency=0.01), machine()).uncompressed.step


def test_sending_the_same_in_other_messages_is_not_nothing() -> None:
    work = workload(200, (64, 64), backward=0.1)
    choice = choose(NONE, allowed("lossless"), work, network(1e9, latency=0.01), machine())
    assert choice.best.plan.lossless
    assert choice.reason.startswith(f"none in messages of 1.0 MiB: {1000 * choice.best.step:.0f} ms a step predicted")


def test_few_large_tensors_travel_as_they_come() -> None:
    work = workload(2, (2048, 256), backward=0.1, tensors=8)  # buckets of 16 MiB
    best = choose(NONE, allowed("safe"), work, SLOW, machine(6e9)).best
    assert best.plan.compressor.name in SMALLEST
    assert best.plan.message_bytes is None
    parts = predict(dataclasses.replace(best.plan, message_bytes=1 << 22), work, SLOW, machine(6e9))
    assert 0.98 * best.step < parts.step < best.step  # what parts would save is too little


def test_the_first_steps_are_chosen_as_if_nothing_could_hide() -> None:
    hidden = dataclasses.replace(WORK, ready=tuple(dataclasses.replace(part, seconds=0.0) for part in WORK.ready))
    assert cold_start(allowed("safe", gentle=True), hidden, SLOW, machine()).compressor.name == "int4"
    assert cold_start(allowed("safe", gentle=True), hidden, FAST, machine(1e8)) == NONE
