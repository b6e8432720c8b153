"""Which plan: the fastest that the quality allows, and why."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from commopt.compressors import Compressor, create
from commopt.config import Quality
from commopt.network.machine import Machine
from commopt.network.table import Network
from commopt.plan import Plan
from commopt.policy.cost import Prediction, Workload, predict

WORTH = 0.03  # of a step that another plan has to save: a change is not free, and a prediction not exact
WORTH_COMPRESSING = 0.05  # the same, for compressing at all: never slower than no compression
UNTRIED = 0.1  # of a step that a compressor which was never in use may save beyond its prediction
LEAST = 0.06  # of a step that other messages have to save: from look to look, predictions differ by half of it
MESSAGES = (1 << 20, 1 << 22, 1 << 24, 1 << 26)  # bytes; the largest bounds the memory
REFINED = 3  # compressors whose messages are looked at more closely

NOTHING = Plan.uncompressed().compressor
GENTLE: tuple[Compressor, ...] = (create("bf16"), create("int8"), create("int4"))  # well within it, from the first step
SAFE: tuple[Compressor, ...] = (create("fp8"), create("int3"))  # within 0.5 % in benchmarks/parity.py
# These learn more slowly. Steps until the loss that 300 uncompressed ones reach, by 300: benchmarks/reach.py.
AGGRESSIVE: Mapping[Compressor, float] = {
    create("int2"): 1.1,
    create("onebit"): 1.73,
    create("powersgd", rank=4): 1.62,
}


@dataclass(frozen=True)
class Choice:
    """What was chosen, and the reason in words.

    Args:
        best: of the plan that was chosen.
        current: of the plan in use.
        uncompressed: of no compression.
        looked_at: of each compressor that the quality allows, the one first that comes to the same loss first.
        reason: with the figures that led to it.
    """

    best: Prediction
    current: Prediction
    uncompressed: Prediction
    looked_at: tuple[Prediction, ...]
    reason: str


def allowed(quality: Quality, gentle: bool = False) -> tuple[Compressor, ...]:
    """The compressors to choose from; ``gentle`` while the gradient changes fast."""
    return {
        "lossless": (),
        "safe": GENTLE if gentle else GENTLE + SAFE,
        "aggressive": GENTLE if gentle else (*GENTLE, *SAFE, *AGGRESSIVE),
    }[quality]


def choose(
    current: Plan,
    compressors: Iterable[Compressor],
    workload: Workload,
    network: Network,
    machine: Machine,
    experience: Mapping[Compressor, float] | None = None,
) -> Choice:
    """The plan of ``compressors`` and no compression that comes to the same loss first; ``current`` where it is allowed
    and nearly as fast.

    Args:
        experience: measured over predicted step, of compressors that were in use. Others are expected to do as well
            as the best of these, and those that come close are tried: a prediction is not that exact.
    """
    known = dict(experience or {})
    compressed = [factor for tried, factor in known.items() if tried != NOTHING]
    usual = min(compressed, default=known.get(NOTHING, 1.0))

    def cost(plan: Plan) -> Prediction:
        predicted = predict(plan, workload, network, machine)
        return replace(predicted, step=predicted.step * known.get(plan.compressor, usual))

    plans = [Plan.uncompressed(), *(Plan(compressor, compressor.wants_feedback) for compressor in compressors)]
    firsts = sorted((_fused(_apart(plan, cost), cost, MESSAGES[:1]) for plan in plans), key=_course)
    refined = [_fused(seen.plan, cost, MESSAGES[1:], seen) for seen in firsts[:REFINED]]
    looked_at = sorted([*refined, *firsts[REFINED:]], key=_course)
    now, plain = cost(current), cost(Plan.uncompressed())

    permitted = {plan.compressor for plan in plans}
    bar = WORTH_COMPRESSING if current.lossless else WORTH_COMPRESSING - WORTH

    def hope(seen: Prediction) -> float:
        untried = known and not current.lossless and seen.plan.compressor not in known
        return _course(seen) * (1 - UNTRIED if untried and _course(seen) < (1 - bar) * plain.step else 1.0)

    best, fastest = min(looked_at, key=hope), looked_at[0]
    if not fastest.plan.lossless and plain.step <= _course(fastest) / (1 - bar):
        best = now if current.lossless else plain
    elif current.compressor in permitted and _course(now) <= hope(best) / (1 - WORTH):
        best = now
    reason = _reason(best, plain, looked_at)
    if known and best not in (now, plain, fastest):
        reason += f"; it is tried, for {describe(fastest.plan)} is hardly faster by prediction"
    return Choice(best, now, plain, tuple(looked_at), reason)


def cold_start(compressors: Iterable[Compressor], workload: Workload, network: Network, machine: Machine) -> Plan:
    """The plan of the first steps, before backward was timed: as if nothing could hide behind it."""
    return choose(Plan.uncompressed(), compressors, workload, network, machine).best.plan


def _course(seen: Prediction) -> float:
    """Seconds a step, if the steps to the same loss were as many as without compression."""
    return seen.step * AGGRESSIVE.get(seen.plan.compressor, 1.0)


def _apart(plan: Plan, cost: Callable[[Plan], Prediction]) -> Plan:
    """With vectors and small tensors uncompressed, where they would be padding for the most part, and that pays for
    messages of their own."""
    apart = replace(plan, small=Plan.uncompressed())
    return plan if plan.lossless or cost(apart).step >= (1 - LEAST) * cost(plan).step else apart


def _fused(
    plan: Plan, cost: Callable[[Plan], Prediction], sizes: Iterable[int], known: Prediction | None = None
) -> Prediction:
    """With the message size that is fastest; a bucket as it is, where that is not much slower."""
    seen = [cost(replace(plan, message_bytes=size)) for size in sizes]
    whole = known or cost(replace(plan, message_bytes=None))
    best = min([whole, *seen], key=lambda each: each.step)
    return best if best.step < (1 - LEAST) * whole.step else whole


def _reason(best: Prediction, plain: Prediction, looked_at: Sequence[Prediction]) -> str:
    share = plain.exposed / plain.step if plain.step else 0.0
    without = f"uncompressed {_ms(plain.step)} a step, {share:.0%} of it exposed communication"
    others = [seen for seen in looked_at if seen.plan.compressor not in (best.plan.compressor, plain.plan.compressor)]
    next_best = f"; next {describe(others[0].plan)} at {_ms(others[0].step)}" if others else ""
    if best.plan == plain.plan:
        gain = max(0.0, 1 - _course(looked_at[0]) / plain.step) if plain.step else 0.0
        return f"do nothing: {without}; the best that is allowed would save {gain:.0%}{next_best}"
    more = AGGRESSIVE.get(best.plan.compressor, 1.0)
    steps = f" (and {more:.1f} times the steps to the same loss)" if more > 1 else ""
    return f"{describe(best.plan)}: {_ms(best.step)} a step predicted{steps}, {without}{next_best}"


def describe(plan: Plan) -> str:
    """A plan in a few words.

    >>> describe(Plan(create("powersgd", rank=2), True, message_bytes=1 << 20))
    'powersgd(rank=2) in messages of 1.0 MiB'
    """
    compressor = plan.compressor
    usual = vars(create(compressor.name))
    options = {name: value for name, value in vars(compressor).items() if value != usual[name]}
    listed = f"({', '.join(f'{name}={value}' for name, value in options.items())})" if options else ""
    size = f" in messages of {plan.message_bytes / 2**20:.1f} MiB" if plan.message_bytes else ""
    return f"{compressor.name}{listed}{size}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
