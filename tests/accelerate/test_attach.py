"""`attach` on living ranks: before and after `prepare`, several models, and what is refused."""

import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

import commopt
from accelerate_commopt import CommOptPlugin, attach
from commopt import AttachError, CommOptConfig, ConfigError
from commopt.compressors import available
from tests.accelerate.training import (
    Regression,
    accelerator_of,
    flat,
    heard,
    loader_of,
    ranks_of_the_group,
    sgd,
    train,
    trainer_of,
)
from tests.workers import Workers

STEPS = 4


def prepared_run(
    rank: int, world: int, when: str = "before", steps: int = STEPS, accumulate: int = 1, **options: Any
) -> tuple[torch.Tensor, commopt.Stats, dict[str, Any]]:
    """Parameters, totals and what DDP was told after a short training."""
    with accelerator_of(rank, world, gradient_accumulation_steps=accumulate) as accelerator:
        model = Regression()
        if when == "before":
            attachment = attach(accelerator, **options)
        ready = accelerator.prepare(model, sgd(model), loader_of(steps, world))
        if when == "amid":
            train(accelerator, *ready)
        if when != "before":
            attachment = attach(accelerator, **options)
        train(accelerator, *ready)
        return flat(model), attachment.stats(), {"cap": ready[0].bucket_bytes_cap}


def test_before_prepare_and_after_it_give_the_same_bits(workers: Workers) -> None:
    before = workers.run(prepared_run, compressor="int4")
    after = workers.run(prepared_run, compressor="int4", when="after")
    assert torch.equal(before[0][0], before[1][0])
    assert torch.equal(before[0][0], after[0][0])
    assert before[0][1].bytes_sent == after[0][1].bytes_sent < 0.3 * after[0][1].bytes_uncompressed
    assert [run[0][2]["cap"] >> 20 for run in (before, after)] == [3, 25]


def test_in_the_middle_of_training_it_takes_effect_with_the_next_backward(workers: Workers) -> None:
    (mine, stats, _), (theirs, *_) = workers.run(prepared_run, compressor="int8", when="amid")
    assert torch.equal(mine, theirs)
    assert stats.steps == STEPS
    assert stats.bytes_sent < 0.4 * stats.bytes_uncompressed


def test_auto_trains(workers: Workers) -> None:
    (mine, stats, _), (theirs, *_) = workers.run(prepared_run)
    assert torch.equal(mine, theirs)
    assert stats.steps == STEPS


def test_accumulation_exchanges_once_an_optimizer_step(workers: Workers) -> None:
    (mine, stats, _), (theirs, *_) = workers.run(prepared_run, compressor="int8", steps=8, accumulate=4)
    assert torch.equal(mine, theirs)
    assert stats.steps == 2


def mixed(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    with accelerator_of(rank, world, mixed_precision="bf16") as accelerator:
        attachment = attach(accelerator, "int8")
        model, optimizer, loader = accelerator.prepare(raw := Regression(), sgd(raw), loader_of(STEPS, world))
        train(accelerator, model, optimizer, loader)
        loss = model(**next(iter(loader)))["loss"].detach()
        return flat(model), accelerator.gather(loss), attachment.explain()


def test_bf16_and_gather(workers: Workers) -> None:
    mine, theirs = workers.run(mixed)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    assert mine[1].shape == (2,)
    assert "int8" in mine[2]


def several_models(rank: int, world: int) -> dict[str, Any]:
    """Two models that are trained by turns."""
    with accelerator_of(rank, world) as accelerator:
        attachment = attach(accelerator, "int8", log_every=1)
        first, second = Regression(), Regression()
        raw = [first, second, sgd(first), sgd(second), loader_of(STEPS, world)]
        a, b, of_a, of_b, loader = accelerator.prepare(*raw)
        losses: list[list[float | None]] = []
        for step, batch in enumerate(loader):
            for model, optimizer, scale in ((a, of_a, 1.0), (b, of_b, 10.0)):
                if model is b and step % 2:
                    continue
                accelerator.backward(model(**batch)["loss"] * scale)
                optimizer.step()
                optimizer.zero_grad()
            losses.append([watch.supervisor.window and watch.supervisor.window.loss for watch in watches(attachment)])
        with pytest.raises(AttachError, match=r"2 models are prepared.*\.handles"):
            _ = attachment.handle
        own = [first.losses, second.losses]
        steps = [handle.stats().steps for handle in attachment.handles]
        return {"losses": losses, "own": own, "steps": steps, "all": attachment.stats().steps}


def watches(attachment: Any) -> Any:
    return attachment.supervision.watches


def test_several_models_have_a_handle_and_a_loss_each(workers: Workers) -> None:
    mine, theirs = workers.run(several_models)
    assert mine["steps"] == [4, 2]
    assert mine["all"] == 6
    means = [[(x + y) / 2 for x, y in zip(*pair, strict=True)] for pair in zip(mine["own"], theirs["own"], strict=True)]
    assert [pair[0] for pair in mine["losses"]] == pytest.approx(means[0])
    assert [pair[1] / 10 for pair in mine["losses"]] == pytest.approx([means[1][step // 2] for step in range(4)])


def arguments_kept(rank: int, world: int) -> tuple[bool, bool, int]:
    from accelerate.utils import DistributedDataParallelKwargs  # type: ignore[import-untyped]

    own = DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=7)
    with accelerator_of(rank, world, kwargs_handlers=[own]) as accelerator:
        attachment = attach(accelerator, "int8")
        ddp = accelerator.prepare(Regression())
        attachment.close()
        assert accelerator.ddp_handler is own
        return ddp.find_unused_parameters, ddp.gradient_as_bucket_view, ddp.bucket_bytes_cap >> 20


def test_the_users_own_arguments_of_ddp_are_kept(workers: Workers) -> None:
    assert workers.run(arguments_kept) == [(True, True, 7)] * 2


def hooks_refused(rank: int, world: int) -> None:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    for hook in DDPCommunicationHookType:
        own = DistributedDataParallelKwargs(comm_hook=hook)
        with accelerator_of(rank, world, kwargs_handlers=[own]) as accelerator:
            if hook.value == "no":
                attach(accelerator, "int8")
                continue
            with pytest.raises(AttachError, match=f"comm_hook='{hook.value}'.*DDP takes one.*Leave comm_hook out"):
                attach(accelerator, "int8")
            assert accelerator.ddp_handler is own


def test_a_hook_of_accelerates_own_is_refused(workers: Workers) -> None:
    workers.run(hooks_refused)
    assert {"fp16", "bf16", "powersgd"} <= set(available())  # which the error names


def bad_calls(rank: int, world: int) -> None:
    with accelerator_of(rank, world) as accelerator:
        with pytest.raises(ConfigError, match="did you mean 'int8'"):
            attach(accelerator, "int88")
        with pytest.raises(ConfigError, match="rank"):
            attach(accelerator, "int8", rank=4)
        with pytest.raises(ConfigError, match="log_every must be at least 1"):
            attach(accelerator, "int8", log_every=0)
        with pytest.raises(AttachError, match=r"got Regression.*commopt\.attach"):
            attach(Regression(), "int8")
        first = attach(accelerator, "int8")
        with pytest.raises(AttachError, match=r"attached to this Accelerator already.*close\(\)"):
            attach(accelerator, "int8")
        first.close()
        attach(accelerator, "int4")
        model = accelerator.prepare(raw := Regression())
        assert accelerator._commopt.handle.config.compressor == "int4"
        assert model.module is raw


def test_bad_calls_are_typed_errors_and_change_nothing(workers: Workers) -> None:
    workers.run(bad_calls)


def alone(rank: int, world: int) -> list[str]:
    """An Accelerator of one process, by itself and among several that were launched."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    with ranks_of_the_group(rank, world), mock.patch.dict(os.environ):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        accelerator = Accelerator()  # as on a machine without an accelerator
        assert accelerator.num_processes == 1
        os.environ["WORLD_SIZE"] = "2"
        with pytest.raises(AttachError, match=r"2 processes were launched, but this Accelerator is alone.*cpu=True"):
            attach(accelerator)
        del os.environ["WORLD_SIZE"]
        said = heard(lambda: attach(accelerator, "int8"))
        model = Regression()
        train(accelerator, *accelerator.prepare(model, sgd(model), loader_of(STEPS, 1)))
        assert len(model.losses) == STEPS
        assert accelerator._commopt.handles == []
        assert accelerator._commopt.stats() == commopt.Stats()
        accelerator._commopt.close()
        return said


def test_a_world_of_one_is_noticed(workers: Workers) -> None:
    (said,) = workers.run(alone, world=1)
    assert len(said) == 1
    assert "one process has nobody to exchange gradients with" in said[0]


def sharded(rank: int, world: int) -> None:
    from accelerate import Accelerator, DistributedType, ParallelismConfig

    with accelerator_of(rank, world) as accelerator:
        for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            of = mock.patch.object(Accelerator, "distributed_type", kind)
            with of, pytest.raises(AttachError, match=f"{kind.value} .*not support"):
                attach(accelerator)
        for sizes in ({"tp_size": 2}, {"dp_shard_size": 2}, {"cp_size": 2}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parallelism = ParallelismConfig(**sizes)
            of = mock.patch.object(Accelerator, "parallelism_config", parallelism)
            with of, pytest.raises(AttachError, match=next(iter(sizes))):
                attach(accelerator)
        assert accelerator.ddp_handler is None


def test_sharded_and_model_parallelism_are_refused(workers: Workers) -> None:
    workers.run(sharded)


def plugin_alone(rank: int, world: int) -> int:
    """Without `attach`: it compresses, and nothing watches."""
    with accelerator_of(rank, world) as accelerator:
        accelerator.ddp_handler = plugin = CommOptPlugin(CommOptConfig("int8"))
        model = Regression()
        train(accelerator, *accelerator.prepare(model, sgd(model), loader_of(STEPS, world)))
        ((module, handle),) = plugin.models
        assert module is model
        stats = handle.stats()
        handle.close()
        assert stats.bytes_sent < 0.4 * stats.bytes_uncompressed
        return stats.steps


def test_the_plugin_works_alone(workers: Workers) -> None:
    assert workers.run(plugin_alone) == [STEPS] * 2


def without_accelerators_backward(rank: int, world: int) -> list[str]:
    with accelerator_of(rank, world) as accelerator:
        attachment = attach(accelerator, "int8")
        model, optimizer, loader = accelerator.prepare(raw := Regression(), sgd(raw), loader_of(STEPS, world))

        def steps() -> None:
            for batch in loader:
                model(**batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()

        said = heard(steps)
        assert attachment.stats().steps == STEPS
        return said


def test_who_does_not_call_accelerates_backward_is_told_once(workers: Workers) -> None:
    for said in workers.run(without_accelerators_backward):
        assert ["nothing watches: call" in text for text in said] == [True]


def switched(rank: int, world: int) -> tuple[list[float], str]:
    """Bytes of each step; compression is off before the model is prepared, and on after two steps."""
    with accelerator_of(rank, world) as accelerator:
        attachment = attach(accelerator, "int8")
        attachment.disable()
        model, optimizer, loader = accelerator.prepare(raw := Regression(), sgd(raw), loader_of(6, world))
        sent = []
        for step, batch in enumerate(loader):
            if step == 2:
                explained = attachment.explain()
                attachment.enable()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            record = attachment.handle.engine.record
            assert record is not None
            sent.append(record.bytes_sent)
        return sent, explained


def test_the_switch(workers: Workers) -> None:
    sent, explained = workers.run(switched)[0]
    assert [nbytes < 0.5 * sent[1] for nbytes in sent[1:]] == [False, False, True, True, True]
    assert "switched off" in explained


def rewrapped(rank: int, world: int) -> tuple[int, int, list[torch.Tensor]]:
    """What a search for a batch size that fits does: the same model is prepared anew, and then another one."""
    with accelerator_of(rank, world) as accelerator:
        attachment = attach(accelerator, "int8")
        model, trained = Regression(), []
        for made in (model, model, Regression()):
            accelerator.free_memory()
            ready = accelerator.prepare(made, sgd(made), loader_of(STEPS, world))
            train(accelerator, *ready)
            del ready
            trained.append(flat(made))
        return len(attachment.handles), attachment.handle.stats().steps, trained


def test_a_model_that_is_prepared_anew_is_attached_anew(workers: Workers) -> None:
    (count, steps, mine), (_, _, theirs) = workers.run(rewrapped)
    assert (count, steps) == (1, STEPS)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert torch.equal(mine[0], mine[2])
    assert not torch.equal(mine[0], mine[1])


def trainer_refused(rank: int, world: int, folder: str) -> None:
    with ranks_of_the_group(rank, world):
        trainer = trainer_of(Regression(), folder, STEPS, world)
        attachment = attach(trainer, "int8")
        with pytest.raises(AttachError, match="attached to this Accelerator already"):
            attach(trainer, "int8")
        attachment.close()


def test_a_trainer_is_attached_to_once(workers: Workers, tmp_path: Any) -> None:
    workers.run(trainer_refused, folder=str(tmp_path))
