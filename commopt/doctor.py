"""A few uncompressed steps of a user's own training, and what to do about them.

The environment asks for it, so that the training need not know; rank 0 leaves a `Diagnosis` in a file, and all ranks
end after the same step.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from commopt.config import AUTO, QUALITIES, CommOptConfig, Quality
from commopt.errors import ConfigError
from commopt.network.curve import number
from commopt.pilot import FIRST, Pilot
from commopt.policy.choice import WORTH_COMPRESSING, Choice, describe
from commopt.records import StepRecord

VARIABLE = "COMMOPT_DOCTOR"
STEPS = 20  # the first half of them is not measured: allocators, caches and DDP's buckets settle


@dataclass(frozen=True)
class Request:
    """What a training is asked for through the environment.

    Args:
        steps: exchanges after which it ends.
        quality: what may be recommended.
        file: where rank 0 writes the diagnosis.

    Raises:
        ConfigError: a field is of the wrong type or out of range.
    """

    steps: int
    quality: Quality
    file: str

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < FIRST:
            raise ConfigError(f"the doctor needs at least {FIRST} steps, got {self.steps!r}.")
        if self.quality not in QUALITIES:
            raise ConfigError(f"quality must be one of {', '.join(QUALITIES)}, got {self.quality!r}.")
        if not isinstance(self.file, str) or not self.file:
            raise ConfigError(f"the doctor needs the name of a file, got {self.file!r}.")

    def __str__(self) -> str:
        """What ranks have to agree on; each host has a file of its own."""
        return f"{self.steps} steps, quality {self.quality}"

    @classmethod
    def from_environment(cls) -> "Request | None":
        """None where nobody asks for the doctor."""
        if not (text := os.environ.get(VARIABLE)):
            return None
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{VARIABLE} is set, but not by commopt doctor ({error}): unset it.") from error

    def to_environment(self) -> dict[str, str]:
        """The inverse of `from_environment`."""
        return {VARIABLE: json.dumps(asdict(self))}

    def instead_of(self, config: CommOptConfig) -> CommOptConfig:
        """What is used in place of the user's ``config``: measured, and nothing else."""
        return replace(config, compressor=AUTO, options={}, error_feedback=None, quality=self.quality)


@dataclass(frozen=True)
class MeasuredLink:
    """Between two hosts; ``latency`` in seconds one way, ``bandwidth`` in bytes/s each way."""

    hosts: tuple[int, int]
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Candidate:
    """A plan that was looked at, and its predicted seconds a step."""

    plan: str
    step: float


@dataclass(frozen=True)
class Diagnosis:
    """What was measured without compression, and what is recommended.

    Args:
        ranks, hosts: how many took part.
        steps: that were run.
        links: those that were probed; none for a single rank.
        nbytes: of the gradients of a step.
        step: seconds of an uncompressed step.
        compute: seconds that the same step would take without any exchange.
        exposed: share of a step that is spent waiting for communication.
        recommended: the plan; None to do nothing.
        looked_at: the fastest first, no compression among them.
        quality: what was allowed.
        reason: of the recommendation, with the figures that led to it.
    """

    ranks: int
    hosts: int
    steps: int
    links: tuple[MeasuredLink, ...]
    nbytes: int
    step: float
    compute: float
    exposed: float
    recommended: Candidate | None
    looked_at: tuple[Candidate, ...]
    quality: Quality
    reason: str

    @property
    def best_gain(self) -> float:
        """Share of a step that nothing done about communication can exceed."""
        return max(1 - self.compute / self.step, 0.0)

    @property
    def gain(self) -> float:
        """Share of a step that the recommended plan saves, by prediction."""
        return max(1 - self.recommended.step / self.step, 0.0) if self.recommended else 0.0

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> "Diagnosis":
        """The inverse of `to_plain`, also after JSON; raises ``ConfigError`` for anything else."""
        try:
            links = tuple(
                MeasuredLink((_count(low), _count(high)), _amount(link["latency"]), _amount(link["bandwidth"]))
                for link in plain["links"]
                for low, high in [link["hosts"]]
            )
            best = plain["recommended"]
            diagnosis = cls(
                ranks=_count(plain["ranks"]),
                hosts=_count(plain["hosts"]),
                steps=_count(plain["steps"]),
                links=links,
                nbytes=_count(plain["nbytes"]),
                step=_amount(plain["step"]),
                compute=_amount(plain["compute"]),
                exposed=_amount(plain["exposed"]),
                recommended=None if best is None else _candidate(best),
                looked_at=tuple(_candidate(each) for each in plain["looked_at"]),
                quality=plain["quality"],
                reason=_text(plain["reason"]),
            )
        except (TypeError, LookupError, ValueError) as error:
            raise ConfigError(f"these plain values are no diagnosis: {type(error).__name__}: {error}.") from error
        sensible = diagnosis.ranks and diagnosis.step and diagnosis.exposed <= 1
        if not sensible or diagnosis.quality not in QUALITIES:
            raise ConfigError("these plain values are no diagnosis: ranks, step, share or quality is out of range.")
        return diagnosis

    @classmethod
    def read(cls, file: Path) -> "Diagnosis":
        """From the file that rank 0 wrote; raises ``ConfigError`` for anything else."""
        try:
            return cls.from_plain(json.loads(file.read_text()))
        except ValueError as error:
            raise ConfigError(f"{file} is no diagnosis: {error}") from error


def diagnose(pilot: Pilot, request: Request) -> Diagnosis | None:
    """On rank 0, after the step at whose end ``pilot`` decided; None where it did not."""
    network, choice = pilot.network, pilot.choice
    if network is None or choice is None or pilot.measured is None:
        return None
    seen, workload = pilot.measured
    best = choice.best
    nothing = best.plan == choice.uncompressed.plan
    return Diagnosis(
        ranks=len(network.hosts),
        hosts=len(set(network.hosts)),
        steps=request.steps,
        links=tuple(MeasuredLink(pair, link.latency, link.bandwidth) for pair, link in network.links.items()),
        nbytes=workload.nbytes,
        step=seen.step,
        compute=workload.compute,
        exposed=seen.exposed,
        recommended=None if nothing else Candidate(describe(best.plan), best.step),
        looked_at=tuple(Candidate(describe(each.plan), each.step) for each in choice.looked_at),
        quality=request.quality,
        reason=_why_nothing(choice) if nothing else f"{seen.exposed:.0%} of an uncompressed step waits for gradients",
    )


def _why_nothing(choice: Choice) -> str:
    """What else there was, and why it is not worth it."""
    plain = choice.uncompressed
    others = [each for each in choice.looked_at if each.plan.compressor != plain.plan.compressor]
    if not others:
        return "this quality allows no compression, and other sizes of messages are hardly faster"
    gain = 1 - others[0].step / plain.step
    said = f"would save {gain:.1%}, and has to save {WORTH_COMPRESSING:.0%}" if gain > 0 else "would be slower"
    return f"the fastest compression that is allowed, {describe(others[0].plan)}, {said}"


def alone(record: StepRecord, request: Request) -> Diagnosis:
    """Of a single process, after its last step."""
    reason = "one process exchanges nothing, so that there is nothing to compress"
    seconds = record.step_seconds
    return Diagnosis(1, 1, request.steps, (), 0, seconds, seconds, 0.0, None, (), request.quality, reason)


def end(request: Request, pilot: Pilot, record: StepRecord, rank: int, world: int) -> NoReturn:
    """Writes the diagnosis on rank 0, and ends the training: what a script exits by, no trainer takes for an error."""
    if rank:
        raise SystemExit(0)
    found = alone(record, request) if world == 1 else diagnose(pilot, request)
    if found is None:
        raise SystemExit(f"commopt doctor: nothing could be measured ({pilot.explanation})")
    Path(request.file).write_text(json.dumps(found.to_plain(), indent=1))
    raise SystemExit(0)


def _candidate(plain: Any) -> Candidate:
    return Candidate(_text(plain["plan"]), _amount(plain["step"]))


def _amount(value: Any) -> float:
    given = number(value)
    if not 0 <= given < math.inf:
        raise ConfigError(f"expected a number of at least 0, got {value!r}.")
    return given


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"expected a count, got {value!r}.")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"expected a text, got {value!r}.")
    return value
