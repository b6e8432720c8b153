"""What trackers are told, and what becomes of a training that is in trouble."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_commopt import attach
from commopt import GuardConfig
from tests.accelerate.training import (
    Regression,
    Samples,
    accelerator_of,
    closing,
    flat,
    heard,
    loader_of,
    ranks_of_the_group,
    sgd,
    train,
    trainer_of,
)
from tests.workers import Workers

STEPS = 6
NAMES = {"ratio", "exposed_share", "compression_ratio", "step_seconds", "bytes_sent", "throughput", "events"}


def tracked(rank: int, world: int, folder: str) -> tuple[list[tuple[int | None, dict[str, float]]], bool]:
    from accelerate.tracking import GeneralTracker  # type: ignore[import-untyped]

    class Tracker(GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, tracker = "list", False, None
        main_process_only = False

        def __init__(self) -> None:
            super().__init__()
            self.logged: list[tuple[int | None, dict[str, float]]] = []

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, float], step: int | None, **kwargs: Any) -> None:
            self.logged.append((step, values))

    tracker = Tracker()
    with accelerator_of(rank, world, log_with=tracker, project_dir=folder) as accelerator:
        accelerator.init_trackers("run")
        attach(accelerator, "int8", log_every=2)
        model, optimizer, loader = accelerator.prepare(raw := Regression(), sgd(raw), loader_of(STEPS, world))
        train(accelerator, model, optimizer, loader)
        accelerator.end_training()
        return tracker.logged, hasattr(accelerator, "_commopt")


def test_windows_go_to_the_trackers(workers: Workers, tmp_path: Path) -> None:
    (logged, attached), other = workers.run(tracked, folder=str(tmp_path))
    assert [step for step, _ in logged] == [1, 3, 5]
    for _, values in logged:
        assert {f"commopt/{name}" for name in NAMES} <= values.keys()
        assert values["commopt/compression_ratio"] > 3
    assert not attached  # after end_training
    assert other == ([], False)  # Accelerate logs on the main process
    lines = lines_of(tmp_path)
    assert [line["kind"] for line in lines] == ["run", "window", "window", "window", "summary"]
    assert "Int8" in lines[0]["parameters"]["compressor"]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "commopt.jsonl").read_text().splitlines()]


def poisoned(rank: int, world: int, poison: float, bad: int, scaler: bool = False) -> dict[str, Any]:
    """A training whose batches of steps 20 to ``20 + bad - 1`` are poisoned on one rank."""
    with accelerator_of(rank, world) as accelerator:
        if scaler:  # as with mixed_precision="fp16", which Accelerate refuses on a CPU
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        attachment = attach(accelerator, "int8", snapshot_every=2, guard=GuardConfig(window=16, cool_down=4))
        raw = Regression()
        optimizer = sgd(raw)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step / world))
        model, optimizer, loader, scheduler = accelerator.prepare(raw, optimizer, loader_of(32, world), scheduler)
        rates, weights = [], []

        def steps() -> None:
            for step, batch in enumerate(loader):
                scale = poison if rank == 1 and 20 <= step < 20 + bad else 1.0
                accelerator.backward(model(**batch)["loss"] * scale)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                rates.append(scheduler.get_last_lr()[0])
                momenta = [state["momentum_buffer"].flatten() for state in optimizer.state.values()]
                weights.append(torch.cat([flat(raw), *momenta]))

        said = heard(steps)
        (watch,) = attachment.supervision.watches
        events = [event.action for event in watch.supervisor.monitor.summary().events]
        return {"said": said, "events": events, "rates": rates, "weights": weights, "loss": raw.losses[-1]}


def test_a_batch_that_is_not_finite_is_skipped_on_all_ranks(workers: Workers) -> None:
    mine, theirs = workers.run(poisoned, poison=math.nan, bad=1)
    assert mine["events"] == theirs["events"] == ["skip"]
    assert torch.equal(mine["weights"][19], mine["weights"][20])
    assert not torch.equal(mine["weights"][20], mine["weights"][21])
    assert torch.equal(mine["weights"][-1], theirs["weights"][-1])


@pytest.mark.parametrize("scaler", [False, True])
def test_a_poisoned_training_rolls_back(workers: Workers, scaler: bool) -> None:
    mine, theirs = workers.run(poisoned, poison=1e4, bad=4, scaler=scaler)
    assert mine["events"] == theirs["events"]
    assert {"roll_back", "note"} <= set(mine["events"])
    back = next(step for step in range(1, 32) if mine["rates"][step] > mine["rates"][step - 1])
    assert any(torch.equal(mine["weights"][back], earlier) for earlier in mine["weights"][:20])
    assert torch.equal(mine["weights"][-1], theirs["weights"][-1])
    assert torch.isfinite(mine["weights"][-1]).all()
    assert sum("not drawn again" in text for text in mine["said"]) == 1


def watched_trainer(rank: int, world: int, folder: str) -> tuple[list[dict[str, float]], list[float], int]:
    with ranks_of_the_group(rank, world):
        trainer = trainer_of(
            model := Regression(),
            folder,
            STEPS,
            world,
            gradient_accumulation_steps=2,
            logging_strategy="steps",
            logging_steps=3,
            eval_strategy="steps",
            eval_steps=3,
            eval_dataset=Samples(8),
        )
        with closing(attach(trainer, "int8", log_every=3)) as attachment:
            told: list[float] = []
            attachment.validation = told.append  # type: ignore[method-assign, assignment]
            trainer.train()
            first = attachment.stats().steps
            trainer.train()  # the model is wrapped already
            assert len(model.losses) == 4 * STEPS
            assert first == STEPS
            return trainer.state.log_history, told, attachment.stats().steps


def test_the_trainer_logs_beside_its_own(workers: Workers, tmp_path: Path) -> None:
    for history, told, steps in workers.run(watched_trainer, folder=str(tmp_path)):
        ours = [entry for entry in history if "commopt/ratio" in entry]
        theirs = [entry for entry in history if "loss" in entry]
        assert [entry["step"] for entry in ours] == [entry["step"] for entry in theirs] == [3, 6]
        assert ours[0]["commopt/compression_ratio"] > 3
        assert len(told) == 4
        assert steps == 2 * STEPS
    assert [line["kind"] for line in lines_of(tmp_path)] == ["run", "window", "window", "summary"] * 2


def trainers_losses(rank: int, world: int, folder: str) -> tuple[list[float], list[float]]:
    """What the supervisor was told of each step, and what the two batches of each step lost on this rank."""
    with ranks_of_the_group(rank, world):
        trainer = trainer_of(model := Regression(), folder, STEPS, world, gradient_accumulation_steps=2)
        with closing(attach(trainer, "int8", log_every=1)) as attachment:
            told: list[float] = []
            log = attachment.supervision.log

            def listen(values: Any, step: int) -> None:
                window = attachment.supervision.watches[0].supervisor.window
                assert window is not None
                told.append(window.loss or math.nan)
                log(values, step)

            attachment.supervision.log = listen
            trainer.train()
            pairs = [sum(model.losses[step : step + 2]) / 2 for step in range(0, 2 * STEPS, 2)]
            return told, pairs


def test_the_loss_of_a_step_is_the_mean_of_its_batches(workers: Workers, tmp_path: Path) -> None:
    (told, mine), (_, theirs) = workers.run(trainers_losses, folder=str(tmp_path))
    assert told == pytest.approx([(x + y) / 2 for x, y in zip(mine, theirs, strict=True)])


def handler_made_anew(rank: int, world: int, folder: str) -> tuple[torch.Tensor, list[int]]:
    """As the Trainers of transformers 4 do when they begin to train."""
    from accelerate.utils import DistributedDataParallelKwargs  # type: ignore[import-untyped]

    with ranks_of_the_group(rank, world):
        trainer = trainer_of(model := Regression(), folder, STEPS, world)
        with closing(attach(trainer, "int8")) as attachment:
            trainer.accelerator.ddp_handler = DistributedDataParallelKwargs()
            steps = []
            for _ in range(2):
                trainer.train()
                steps.append(attachment.stats().steps)
            return flat(model), steps


def test_a_trainer_that_makes_the_handler_of_ddp_anew_is_attached_to(workers: Workers, tmp_path: Path) -> None:
    (mine, steps), (theirs, _) = workers.run(handler_made_anew, folder=str(tmp_path))
    assert torch.equal(mine, theirs)
    assert steps == [STEPS, 2 * STEPS]
