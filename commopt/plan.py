"""What to do, as an immutable value that all ranks agree on. Plans change between two steps, never within one."""

from dataclasses import dataclass
from typing import Literal

from commopt.compressors import Compressor, Contraction, RowCompressor, create
from commopt.compressors.sparse import Sparse
from commopt.config import CommOptConfig

Route = Literal["all_reduce", "gather", "two_shot", "rounds"]

RUNGS = ("int4", "int8", "bf16", "none")  # from wild to mild
GATHER_UP_TO = 0.1  # sparse payloads are gathered while world size x density is at most this


@dataclass(frozen=True)
class Plan:
    """A compressor and whether this rank keeps what it lost."""

    compressor: Compressor
    feedback: bool

    @classmethod
    def from_config(cls, config: CommOptConfig) -> "Plan":
        """Raises ``ConfigError`` for an unknown compressor or option, or a value out of range."""
        compressor = create(config.compressor, **config.options)
        feedback = compressor.wants_feedback if config.error_feedback is None else config.error_feedback
        return cls(compressor, feedback)

    @classmethod
    def uncompressed(cls) -> "Plan":
        """The plan that compresses nothing."""
        return cls(create("none"), feedback=False)

    def milder(self, rungs: int) -> "Plan":
        """The plan that is ``rungs`` further towards no compression; itself for 0."""
        if rungs == 0 or self.lossless:
            return self
        kept = self.compressor.energy_kept
        ladder = [compressor for compressor in map(create, RUNGS) if compressor.energy_kept > kept]
        compressor = ladder[min(rungs, len(ladder)) - 1]
        return Plan(compressor, compressor.wants_feedback)

    @property
    def lossless(self) -> bool:
        """Whether gradients travel as they are, in their own dtype."""
        return self.compressor.guarantee == Contraction(1.0)

    @property
    def gain(self) -> float:
        """Factor on what is decompressed: error feedback turns an unbiased compressor into a contraction."""
        return self.compressor.shrinkage if self.feedback else 1.0

    @property
    def block(self) -> int:
        """Elements a row of the messages of this plan."""
        return self.compressor.block if isinstance(self.compressor, RowCompressor) else 1

    def route(self, world: int) -> Route:
        """How payloads travel among ``world`` ranks.

        Payloads that sum take an all-reduce. Others are gathered where that costs no more bytes than two shots do (two
        ranks), or while they are so sparse that a second sparsification would cost more than it saves.
        """
        if not isinstance(self.compressor, RowCompressor):
            return "rounds"
        if self.compressor.summable:
            return "all_reduce"
        sparse = isinstance(self.compressor, Sparse) and world * self.compressor.density <= GATHER_UP_TO
        return "gather" if world <= 2 or sparse else "two_shot"
