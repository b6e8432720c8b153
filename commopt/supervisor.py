"""Watches the training of one model and acts on what it sees: it skips steps, switches compression off, rolls back.

    handle.judge --StepRecord--> monitor (means, JSON lines)
                        '------> guard (a verdict) --> the engine's next plan, or a snapshot

Every rank runs the same supervisor on the same figures, which one vote a step brings to all, so that no decision needs
a message of its own.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.collectives.agreement import check_agreement
from commopt.errors import AttachError, CheckpointError, ConfigError, DivergenceError
from commopt.guard import Guard, GuardConfig, Verdict
from commopt.hooks.ddp import Handle
from commopt.monitor import Monitor, Window
from commopt.records import Action, Event, StepRecord
from commopt.resume.snapshot import SnapshotRing, Stateful, fingerprint, share_of_memory

EXCHANGE = "exchange"  # the name of the engine's state
DEFAULT = GuardConfig()


class Supervisor:
    """Binds the exchange of a model to a monitor, a guard, and snapshots to go back to. Call everything on all ranks.

        handle = commopt.attach(ddp_model)
        supervisor = commopt.Supervisor(handle, {"model": ddp_model, "optimizer": optimizer, "random": RandomState()})
        step = 0
        while step < steps:
            loss = loss_of(ddp_model, batch(step))
            supervisor.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step = supervisor.end_step(step)     # the next one, or an earlier one after a roll-back

    Args:
        handle: what ``commopt.attach`` returned.
        states: what a roll-back restores, by name; without any, the guard falls back to uncompressed training instead.
        guard: thresholds; None only monitors.
        monitor: None makes one that writes no file.
        every: steps between two snapshots.
        keep: most snapshots that are held.
        memory: most bytes of host memory for snapshots, see ``SnapshotRing``.
        position: where the training loop begins; after a resume, where it goes on. None: where the state that is
            loaded was taken, or 0.

    Raises:
        ConfigError: an option out of range.
        AttachError: the handle has a supervisor already.
        MismatchError: ranks disagree on what to watch for; raised on every rank.
    """

    def __init__(
        self,
        handle: Handle,
        states: Mapping[str, Stateful],
        *,
        guard: GuardConfig | None = DEFAULT,
        monitor: Monitor | None = None,
        every: int = 50,
        keep: int = 4,
        memory: int | None = None,
        position: int | None = None,
    ) -> None:
        if handle.judge is not None:
            raise AttachError("this handle has a supervisor already: close it first.")
        if EXCHANGE in states:
            raise ConfigError(f"the name {EXCHANGE!r} among the states is the supervisor's own: choose another.")
        self.handle = handle
        self.engine = handle.engine
        settings = {"guard": repr(guard), "snapshots": f"every {every}, keep {keep}", "states": str(sorted(states))}
        check_agreement(self.engine.wire, settings, handle.device)
        self.monitor = monitor or Monitor(rank=self.engine.wire.rank, world=self.engine.wire.world)
        self.window: Window | None = None  # the latest one
        self.guard = Guard(guard) if guard is not None else None
        self.ring: SnapshotRing | None = None
        if states:
            # The scarcest host decides: all ranks must hold the same snapshots.
            limit = int(self._reduced(share_of_memory() if memory is None else memory, dist.ReduceOp.MIN))
            self.ring = SnapshotRing({**states, EXCHANGE: self.engine}, every, keep, limit)
        self._positions: dict[int, int] = {}  # of the training loop, by step of the exchange
        self._verdict: Verdict | None = None  # a roll-back that is due
        self._seen: StepRecord | None = None
        self._begin = position
        self._position = position or 0
        self._take(self.engine.step, self._position)
        handle.judge = self._judge
        if handle.pilot is not None:
            handle.pilot.tell = self._told

    def observe(self, loss: Tensor | float, samples: float | None = None) -> None:
        """See ``Handle.observe``."""
        self.handle.observe(loss, samples)

    def end_step(self, position: int) -> int:
        """Call after the optimizer's step, with the position of the training loop. Takes a snapshot where one is due.

        Returns:
            the position to go on with: the next one, or the one after the snapshot which was restored.

        Raises:
            MismatchError: ranks hold different parameters after a roll-back; raised on every rank.
        """
        self._position = self._end_step(position)
        return self._position

    def validation(self, value: float) -> None:
        """Tells a validation loss, lower is better. The mean over ranks counts; all ranks call it."""
        mean = self._reduced(value, dist.ReduceOp.SUM) / self.engine.wire.world
        step = self.engine.step
        if self.guard is not None:
            self._follow(self.guard.validation(mean, step), step)
        self.engine.restart_clock()

    def state_dict(self) -> dict[str, Any]:
        """Plain values: what the guard and the monitor know, and the exchange with its tensors."""
        return {
            "position": self._position,
            EXCHANGE: self.engine.state_dict(),
            "guard": self.guard.state_dict() if self.guard is not None else {},
            "monitor": self.monitor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Goes on from where `state_dict` was taken; ``parts`` as for ``Engine.load_state_dict``.

        Raises:
            CheckpointError: it is not such a state; nothing was changed.
        """
        for each in (state, *(parts or ())):
            mappings = all(isinstance(each.get(key), Mapping) for key in (EXCHANGE, "guard", "monitor"))
            if not mappings or not isinstance(each.get("position"), int):
                raise CheckpointError(
                    "not the state of a supervisor: the exchange, the guard or the monitor is missing."
                )
        guard = self.guard and Guard(self.guard.config)
        if guard is not None and state["guard"]:  # otherwise it begins anew
            guard.load_state_dict(state["guard"])
        monitor = copy.copy(self.monitor)
        monitor.load_state_dict(state["monitor"])
        self.engine.load_state_dict(state[EXCHANGE], parts and [part[EXCHANGE] for part in parts])
        self.guard, self.monitor = guard, monitor
        if self._begin is None:
            self._position = state["position"]
        self._plan(at_once=True)
        if self.ring is not None:
            self.ring.clear()
        self._take(self.engine.step, self._position)

    def close(self) -> None:
        """Ends the watch; the monitor writes its summary, and the memory of snapshots is free again."""
        self.handle.judge = None
        if self.handle.pilot is not None:
            self.handle.pilot.tell = lambda step, reason: None
        self.monitor.close()
        self.ring = None

    def _told(self, step: int, reason: str) -> None:
        """The plan was changed."""
        self.monitor.event(Event(step, "note", reason))

    def _end_step(self, position: int) -> int:
        record = self.engine.record
        if record is None or record is self._seen:  # accumulates: nothing was exchanged
            return position + 1
        self._seen = record
        if self._verdict is not None:
            return self._roll_back(record, self._verdict)
        if self.ring is not None and self.ring.due(record.step):
            self._take(record.step, position + 1)
        return position + 1

    def _judge(self, record: StepRecord) -> bool:
        """Called at the end of each backward; whether the step may be taken."""
        taken = self._decide(record)
        self.window = self.monitor.add(record, taken) or self.window
        return taken

    def _decide(self, record: StepRecord) -> bool:
        if record.corrupt:  # the engine has said so
            self.monitor.event(Event(record.step, "skip", "checksum: ranks received different mean gradients"))
            return False
        if self.guard is None:
            return record.usable
        if self._verdict is not None:
            self._verdict = None
            self.engine.say_once("a roll-back is due, but end_step was not called: training goes on uncompressed.")
            self._plan()
        verdict = self.guard.step(record, compressed=not self.engine.plan.lossless)
        self.engine.pledge = verdict.action  # should a rank ever decide otherwise, the next vote says so
        if verdict.action == "skip" and not record.usable:  # the engine has said why
            self.monitor.event(Event(record.step, "skip", verdict.reason))
            return False
        return self._follow(verdict, record.step) and record.usable

    def _follow(self, verdict: Verdict, step: int) -> bool:
        """Does what the guard says. Whether the step may be taken."""
        if verdict.action == "pass":
            return True
        if verdict.action == "roll_back" and self.ring is not None and self.ring.steps:
            self._verdict = verdict  # the loop's own state is whole again at the end of its step
            return False
        action: Action = "fall_back" if verdict.action == "roll_back" else verdict.action
        self._note(step, action, verdict.reason)
        if action == "stop":
            raise DivergenceError(f"step {step}: {verdict.reason}")
        self._plan()
        return action != "skip"

    def _plan(self, at_once: bool = False) -> None:
        if self.guard is None:
            return
        self.engine.restrain(self.guard.rung if self.guard.mode == "armed" else None, at_once)

    def _take(self, step: int, position: int) -> None:
        if self.ring is not None:
            self.ring.take(step)
            self._positions[step] = position
            self._positions = {known: self._positions[known] for known in self.ring.steps}

    def _roll_back(self, record: StepRecord, verdict: Verdict) -> int:
        assert self.ring is not None
        assert self.guard is not None
        self._verdict = None
        onset = record.step if verdict.onset is None else verdict.onset
        before = self.ring.newest_before(onset)
        step = min(self.ring.steps) if before is None else before
        age = "" if before is not None else " No snapshot is older than the trouble; this is the oldest."
        disabled = self.engine.disabled
        self.ring.restore(step)
        self.engine.disabled = disabled  # the user's switch does not go back
        self.guard.rolled_back(step + 1)
        self._plan(at_once=True)
        parameters = f"{fingerprint(self.handle.parameters):016x}"
        facts = {"step after the roll-back": str(step), "parameters after the roll-back": parameters}
        remedy = "Start again from the last checkpoint."
        check_agreement(self.engine.wire, facts, self.handle.device, remedy)
        self._note(record.step, "roll_back", verdict.reason + age, step)
        self.engine.restart_clock()
        return self._positions[step]

    def _reduced(self, value: float, op: Any) -> float:
        tensor = torch.tensor([value], dtype=torch.float64, device=self.handle.device)
        return self.engine.wire.all_reduce(tensor, op=op).item()

    def _note(self, step: int, action: Action, reason: str, restored: int | None = None) -> None:
        self.monitor.event(Event(step, action, reason, restored))
        went = f" to step {restored}" if restored is not None else ""
        said = f"{action.replace('_', ' ')}{went}: {reason} (step {step}). {self._outlook(action)}"
        if action == "skip":  # there may be many
            self.engine.say_once(said, kind=action)
        else:
            self.engine.say(said)

    def _outlook(self, action: Action) -> str:
        guard, configured = self.guard, self.engine.configured
        if guard is None or action not in ("fall_back", "roll_back"):
            return ""
        if guard.mode == "finished":
            return "Training goes on without compression."
        milder = configured.milder(guard.rung + 1).compressor.name
        return f"Training goes on without compression for {guard.cool_down_left} steps, then with {milder!r}."
