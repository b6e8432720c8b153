"""What to do, as an immutable value that all ranks agree on. Plans change between two steps, never within one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from commopt.compressors import Compressor, Contraction, RowCompressor, create
from commopt.compressors.sparse import Sparse
from commopt.config import CommOptConfig

Route = Literal["all_reduce", "gather", "two_shot", "rounds"]
TensorClass = Literal["matrix", "embedding", "small"]

RUNGS = ("int4", "int8", "bf16", "none")  # from wild to mild
GATHER_UP_TO = 0.1  # sparse payloads are gathered while world size x density is at most this
SMALL = 2048  # elements, up to which a tensor is small; its rows would be padding for the most part


@dataclass(frozen=True)
class Plan:
    """How gradients travel: a compressor and whether this rank keeps what it lost, for each class of tensor.

    Args:
        compressor: of matrices, and of all for which there is no plan of their own.
        feedback: keep what was lost, and add it to the next gradient.
        small: of vectors and of tensors of at most `SMALL` elements; None for no difference.
        embedding: of embedding tables; None for no difference.
        message_bytes: a message is sent as soon as its gradients take this many bytes; neighbouring buckets of DDP
            travel together and larger ones in parts. None sends each bucket as it is.
    """

    compressor: Compressor
    feedback: bool
    small: "Plan | None" = None
    embedding: "Plan | None" = None
    message_bytes: int | None = None

    @classmethod
    def from_config(cls, config: CommOptConfig) -> "Plan":
        """Raises ``ConfigError`` for an unknown compressor or option, or a value out of range."""
        if config.automatic:
            return cls.uncompressed()
        compressor = create(config.compressor, **config.options)
        feedback = compressor.wants_feedback if config.error_feedback is None else config.error_feedback
        return cls(compressor, feedback)

    @classmethod
    def uncompressed(cls) -> "Plan":
        """The plan that compresses nothing."""
        return cls(create("none"), feedback=False)

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "compressor": self.compressor.name,
            "options": dict(vars(self.compressor)),
            "feedback": self.feedback,
            "small": self.small and self.small.to_plain(),
            "embedding": self.embedding and self.embedding.to_plain(),
            "message_bytes": self.message_bytes,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Plan":
        """The inverse of `to_plain`."""
        small, embedding = plain["small"], plain["embedding"]
        return cls(
            create(plain["compressor"], **plain["options"]),
            plain["feedback"],
            small and cls.from_plain(small),
            embedding and cls.from_plain(embedding),
            plain["message_bytes"],
        )

    def of(self, kind: TensorClass) -> "Plan":
        """How tensors of this class travel; all alike in it."""
        own = {"matrix": None, "embedding": self.embedding, "small": self.small}[kind]
        return own or (self if self.uniform else Plan(self.compressor, self.feedback))

    def milder(self, rungs: int) -> "Plan":
        """The plan that is ``rungs`` further towards no compression; itself for 0."""
        if rungs == 0 or self.lossless:
            return self
        small = self.small and self.small.milder(rungs)
        embedding = self.embedding and self.embedding.milder(rungs)
        kept = self.compressor.energy_kept
        ladder = [compressor for compressor in map(create, RUNGS) if compressor.energy_kept > kept]
        compressor = ladder[min(rungs, len(ladder)) - 1] if ladder else self.compressor
        return Plan(compressor, compressor.wants_feedback, small, embedding, self.message_bytes)

    def each(self, change: "Callable[[Plan], Plan]") -> "Plan":
        """With ``change`` made to the part of each class."""
        changed = change(Plan(self.compressor, self.feedback))
        return replace(
            self,
            compressor=changed.compressor,
            feedback=changed.feedback,
            small=self.small and change(self.small),
            embedding=self.embedding and change(self.embedding),
        )

    @property
    def parts(self) -> "tuple[Plan, ...]":
        """The plans of all classes, each once."""
        return tuple(dict.fromkeys(self.of(kind) for kind in ("matrix", "embedding", "small")))

    @property
    def uniform(self) -> bool:
        """Whether all classes of tensors travel alike, bucket by bucket."""
        return self.small is None and self.embedding is None and self.message_bytes is None

    @property
    def lossless(self) -> bool:
        """Whether all gradients travel as they are, in their own dtype."""
        return all(part.compressor.guarantee == Contraction(1.0) for part in (self, self.small, self.embedding) if part)

    @property
    def keeps_residuals(self) -> bool:
        """Whether any class of tensors does."""
        return any(part.feedback for part in (self, self.small, self.embedding) if part)

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


def class_of(shape: tuple[int, ...], embedding: bool) -> TensorClass:
    """The class of a tensor of this shape; whether it is an embedding table is not seen from the shape."""
    numel = 1
    for size in shape:
        numel *= size
    if len(shape) < 2 or numel <= SMALL:
        return "small"
    return "embedding" if embedding else "matrix"
