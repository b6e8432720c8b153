"""The hook of torch's DistributedDataParallel: as thin as can be.

No `from __future__ import annotations` here: torch compares the hook's annotations with the types themselves.
"""

import contextlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from commopt.collectives.agreement import check_agreement
from commopt.collectives.rollcall import roll_call, store_answers
from commopt.collectives.wire import Wire, WireError
from commopt.config import CommOptConfig, Quality
from commopt.doctor import Request, end
from commopt.engine import Engine
from commopt.engine.step import Stats
from commopt.errors import AttachError
from commopt.messages import Bucket
from commopt.network.probe import rough_piece
from commopt.pilot import Pilot
from commopt.plan import Plan, class_of
from commopt.policy.choice import describe
from commopt.records import StepRecord


class GradScaler(Protocol):
    """What we ask of a gradient scaler, such as ``torch.amp.GradScaler``."""

    def is_enabled(self) -> bool:
        """Whether it scales anything, and skips steps."""

    def get_scale(self) -> float:
        """The factor that losses are multiplied by."""


def attach(
    model: DistributedDataParallel,
    compressor: str = "auto",
    *,
    quality: Quality = "safe",
    error_feedback: bool | None = None,
    timeout: float = 1800.0,
    checked: bool = False,
    grad_scaler: GradScaler | None = None,
    **options: Any,
) -> "Handle":
    """Compresses the gradients that ``model`` exchanges. Call it on every rank, before the first backward.

    Args:
        model: a model wrapped by torch's DDP that has no communication hook yet.
        compressor: a registered name, see ``commopt.compressors.available()``, or ``"auto"``: the network, the codecs
            and backward are measured, and the fastest plan that ``quality`` allows is used, none included.
        quality: ``"lossless"``; ``"safe"``, what stayed within 0.5 % of the validation loss of uncompressed training in
            benchmarks; or ``"aggressive"``, also what needs more steps to the same loss, where these cost less time.
        error_feedback: keep what compression lost for the next step; ``None`` follows the compressor's guarantee.
        timeout: seconds that a rank waits for its peers in one collective.
        checked: compare a checksum of the mean gradient over ranks in every step, and skip a step where they differ. It
            finds what was damaged on its way to some ranks, not what reached all of them alike.
        grad_scaler: the scaler of the training loop, if it has one; residuals then follow its scale, and steps that are
            not finite are left for it to skip.
        options: options of the compressor, such as ``rank=4``.

    Raises:
        ConfigError: unknown name or option, or a value out of range.
        AttachError: not a DDP model, or its hook is taken.
        MismatchError: ranks disagree; raised on every rank.
    """
    config = CommOptConfig(compressor, options, error_feedback, timeout, checked, quality)
    return Handle(model, config, grad_scaler)


class Handle:
    """What `attach` returns: the switch, the counters, and the hook itself."""

    def __init__(
        self, model: DistributedDataParallel, config: CommOptConfig, grad_scaler: GradScaler | None = None
    ) -> None:
        plan = Plan.from_config(config)
        self._doctor = Request.from_environment()
        if self._doctor is not None:
            config = self._doctor.instead_of(config)
            plan = Plan.from_config(config)
        self.config = config
        _check_attachable(model)
        self._scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._names = {id(p): name for name, p in model.module.named_parameters()}
        trained = _trained(model)
        if not trained:
            raise AttachError("no parameter of this DDP model needs a gradient any more: there is nothing to exchange.")
        self.parameters = list(trained.values())
        self._touched: set[str] = set()
        self._sees_idle = bool(model.find_unused_parameters or model.static_graph)
        self._steps_of_optimizer: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._backwards = 0
        self._unfinished = False
        self._closed = False

        # torch names a group of some ranks after those and the number of groups alive: were it destroyed, the next one
        # would meet its addresses in the store. So such a group stays; one of all ranks gets a new name each time.
        ranks = dist.get_process_group_ranks(model.process_group)
        self._of_all_ranks = len(ranks) == dist.get_world_size()
        group = _group_of(ranks, config.timeout, local=not self._of_all_ranks)
        self.device = device = self.parameters[0].device
        sparse = _embedding_names(model, sparse=True)
        shapes = {name: _shape(p) for name, p in trained.items() if name not in sparse}
        scale = self._scaler.get_scale if self._scaler else None
        embeddings = _embedding_names(model)
        classes = {name: class_of(shape, name in embeddings) for name, shape in shapes.items()}
        self.engine = Engine(plan, shapes, device, group, scale, config.checked, classes, config.automatic)
        self.pilot: Pilot | None = None
        self._rates: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()  # of learning
        self.judge: Callable[[StepRecord], bool] | None = None
        self._removals: list[Callable[[], None]] = []
        try:
            facts = {"doctor": str(self._doctor)} | _facts(plan, config, trained, self._scaler)
            check_agreement(self.engine.wire, facts, device)
            if config.automatic:
                dtypes = {name: trained[name].dtype for name in shapes}
                examine = self._doctor.steps if self._doctor else None
                self.pilot = Pilot(self.engine, device, config.quality, shapes, dtypes, classes, examine)
            elif self.engine.wire.world > 1:
                self.engine.set_pieces(rough_piece(Wire(group), device))
        except WireError as error:
            who = roll_call(self.engine.wire.rank, group)
            self.close()
            raise WireError(f"{error} {who}") from error
        except BaseException:
            self.close()
            raise

        if self._sees_idle:
            for parameter in self.parameters:
                name = self._names[id(parameter)]
                touch = parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._touched.add(name))
                self._removals.append(touch.remove)
        self._removals.append(register_optimizer_step_pre_hook(self._before_optimizer_step).remove)
        self._removals.append(register_optimizer_step_post_hook(self._after_optimizer_step).remove)
        model.register_comm_hook(self, _hook)

    def observe(self, loss: Tensor | float, samples: float | None = None) -> None:
        """Tells the loss of the backward to come, for `Supervisor` and the records. It reaches the other ranks with the
        vote of the step; nothing waits for it.

        Args:
            loss: a scalar, not multiplied by a loss scale; of several before one exchange, the mean counts.
            samples: samples (or tokens) that this backward is of, for the throughput.
        """
        self.engine.observe(loss, samples)

    def disable(self) -> None:
        """Sends gradients uncompressed, from the same step on all ranks: the one after the next backward, or after the
        one under way. The first such step delivers what the residuals hold. One rank's word is enough."""
        self.engine.request(compress=False)

    def enable(self) -> None:
        """Compresses again, on all ranks from the same step; also where a guard has switched compression off, until
        that guard has its next word."""
        self.engine.request(compress=True)

    def explain(self) -> str:
        """Why gradients travel as they do."""
        if self.engine.disabled or self.engine.restraint is None:
            return "uncompressed: compression is switched off, by the user or by the guard."
        if self.pilot is not None:
            return self.pilot.explanation
        return f"{describe(self.engine.configured)}: as the user chose."

    def stats(self) -> Stats:
        """Totals since the start: steps, bytes, seconds."""
        return self.engine.stats()

    def close(self) -> None:
        """Ends the worker and its process group. The model cannot be trained in this DDP wrapper any more."""
        if self._closed:
            return
        self._closed = True
        for remove in self._removals:
            remove()
        self._removals.clear()
        self.engine.close()
        if self._of_all_ranks and dist.is_initialized():
            dist.destroy_process_group(self.engine.wire.group)

    def _submit(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._closed:
            raise AttachError("the handle of this model was closed; wrap the model in a new DDP and attach again.")
        if self._unfinished:
            self._finish()
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        names = [self._names[id(parameter)] for parameter in parameters]
        idle = frozenset(names) - self._touched if self._sees_idle else frozenset()
        if buffer.is_sparse:  # it has a bucket of its own and no views
            gradients = [buffer]
        elif parameters[0].is_complex():  # in real numbers, of which DDP's own views show the first half
            shapes = [_shape(parameter) for parameter in parameters]
            parts = buffer.split([shape.numel() for shape in shapes])
            gradients = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        else:
            gradients = bucket.gradients()
        last = bucket.is_last()
        future = self.engine.submit(Bucket(bucket.index(), names, buffer, gradients, idle, last))
        if last:
            self._backwards += 1
            self._unfinished = True
            self._touched.clear()
            self._call_after_backward()
        return future

    def _call_after_backward(self) -> None:
        """DDP queues its own finalizer right after this hook; what our first callback queues runs after that one."""
        engine = Variable._execution_engine
        # Outside of backward, a rank that has joined early (DDP's join) shadows the others, or a trainer flushes the
        # first step of a static graph itself: the optimizer, or else the next backward, finds the step unfinished.
        with contextlib.suppress(RuntimeError):
            engine.queue_callback(lambda: engine.queue_callback(self._after_backward))

    def _finish(self) -> bool:
        """Whether the step may be taken: so says the exchange, and then the judge."""
        self._unfinished = False
        usable = self.engine.finish_step()
        record = self.engine.record
        if self.pilot is not None and record is not None:
            self.pilot.end_step(record, max(self._rates.values(), default=None))
            if self._doctor is not None and self._backwards >= self._doctor.steps:
                self.close()
                end(self._doctor, self.pilot, record, self.engine.wire.rank, self.engine.wire.world)
        if self.judge is None or record is None:
            return usable
        approved = False
        try:
            approved = self.judge(record)
        finally:
            if usable and not approved:
                self.engine.skip()
        return usable and approved

    def _after_backward(self) -> None:
        usable, judged = False, False
        try:
            usable, judged = self._finish(), True
        finally:
            if not usable:
                self._leave_out(by_scaler=judged and self._scaler is not None)

    def _leave_out(self, by_scaler: bool) -> None:
        """Makes optimizers pass over this step, their state included. A scaler insists on seeing a gradient, and passes
        over one that is not finite."""
        for parameter in self.parameters:
            if by_scaler and parameter.grad is not None:
                parameter.grad.fill_(torch.nan)
            else:
                parameter.grad = None

    def _before_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._unfinished and self._mine(optimizer):
            self._after_backward()

    def _after_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Not before it: a trainer may run the backward in a closure that it passes to the step."""
        if all(p.grad is None for p in self._mine(optimizer)):
            return
        self._rates[optimizer] = max(float(group.get("lr") or 0.0) for group in optimizer.param_groups)
        if self._steps_of_optimizer.get(optimizer, 0) == self._backwards:
            self.engine.say_once(
                "an optimizer stepped although no gradient was exchanged since its last step, so ranks drift apart. "
                "Call the DDP model itself (not model.module), outside no_sync, and compile the model rather than a "
                "function around it."
            )
        self._steps_of_optimizer[optimizer] = self._backwards

    def _mine(self, optimizer: Optimizer) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names]


def _hook(handle: Handle, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return handle._submit(bucket)


def _group_of(ranks: list[int], timeout: float, local: bool) -> dist.ProcessGroup:
    if not store_answers(timeout):
        raise WireError("the store on rank 0 of the job does not answer: that process ended or stalled.")
    try:
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=local)
    except RuntimeError as error:
        who = roll_call(dist.get_rank(), None)
        raise WireError(f"the process group of the exchange did not come about: {error} {who}") from error
    assert isinstance(group, dist.ProcessGroup)
    return group


def _check_attachable(model: DistributedDataParallel) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise AttachError(
            f"attach needs a torch.nn.parallel.DistributedDataParallel, got {type(model).__name__}: wrap the model."
        )
    if model._comm_hooks:
        taken = getattr(model._comm_hooks[0][0], "__qualname__", "a hook")
        raise AttachError(f"this DDP model has a communication hook already ({taken}); DDP takes one, and for good.")
    if model.mixed_precision is not None:
        raise AttachError("DDP(mixed_precision=...) takes the place of the communication hook; use autocast instead.")


def _trained(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters whose gradients DDP exchanges, by name; it can be told to leave some alone."""
    ignored = model.parameters_to_ignore
    return {name: p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored}


def _shape(parameter: Tensor) -> torch.Size:
    """A gradient's shape in DDP's bucket, where a complex number is two real ones."""
    return torch.Size([*parameter.shape, 2]) if parameter.is_complex() else parameter.shape


def _embedding_names(model: DistributedDataParallel, sparse: bool = False) -> set[str]:
    """Names of embedding tables; with ``sparse``, of those whose gradients are."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = model.module.named_modules()
    return {f"{name}.weight".lstrip(".") for name, m in modules if isinstance(m, kinds) and m.sparse >= sparse}


def _facts(
    plan: Plan, config: CommOptConfig, trained: Mapping[str, torch.nn.Parameter], grad_scaler: GradScaler | None
) -> dict[str, str]:
    facts = {
        "compressor": f"auto, quality {config.quality}" if config.automatic else repr(plan.compressor),
        "error feedback": str(plan.feedback),
        "gradient scaler": str(grad_scaler is not None),
        "checked": str(config.checked),
    }
    for index, (name, p) in enumerate(trained.items()):
        facts[f"parameter {index}"] = f"{name} {list(p.shape)} {p.dtype}"
    return facts
