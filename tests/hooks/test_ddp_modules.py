"""Models and loops that are out of the ordinary: sparse, frozen, shared, idle, accumulated, compiled, joined."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from commopt.errors import CommOptWarning
from tests.engine.steps import same_on_all_ranks, summed
from tests.hooks.training import MLP, SMALL_BUCKETS, attached, equal, loss_of, parameters, train
from tests.workers import Workers


class Words(nn.Module):
    """A sparse embedding, a dense one that shares nothing with it, and a layer."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        super().__init__()
        self.sparse = nn.Embedding(50, 16, sparse=True)
        self.dense = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.sparse(words).mean(1) + self.dense(words).mean(1))
        return scores


def sparse_embedding(rank: int, world: int) -> None:
    torch.sparse.check_sparse_tensor_invariants.enable()  # else torch warns that it does not
    models = [DDP(Words()) for _ in range(3)]
    with attached(models[1], "none") as none, attached(models[2], "int8", error_feedback=True) as int8:
        for step in range(6):
            words = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(10 * step + rank))
            for model in models:
                model(words).square().sum().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(0.05 * parameter.grad.to_dense())
                        parameter.grad = None
            assert equal(parameters(models[1]), parameters(models[0]))
            assert same_on_all_ranks(models[2].parameters())
        for one, other in zip(parameters(models[2]), parameters(models[0]), strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.01)
        assert "sparse.weight" not in int8.engine.residuals.final()
        assert none.stats().bytes_sent > int8.stats().bytes_sent


@pytest.mark.filterwarnings("ignore:rank .. sparse gradients travel uncompressed")
@pytest.mark.parametrize("world", [2, 3])
def test_a_sparse_embedding_passes_through(workers: Workers, world: int) -> None:
    workers.run(sparse_embedding, world)


def accumulate(rank: int, world: int) -> None:
    plain, ours = DDP(MLP()), DDP(MLP())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours)]
    with attached(ours, "none") as handle:
        sent = handle.stats().bytes_sent
        for step in range(5):
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                optimizer.zero_grad()
                with model.no_sync():
                    for micro in range(3):
                        loss_of(model, rank, 10 * step + micro).backward()
                        assert handle.stats().bytes_sent == sent
                loss_of(model, rank, 10 * step + 3).backward()
                optimizer.step()
            assert handle.stats().steps == step + 1
            sent = handle.stats().bytes_sent
            assert equal(parameters(ours), parameters(plain))


def test_accumulation_talks_once_an_optimizer_step(workers: Workers) -> None:
    workers.run(accumulate)


class Halves(nn.Module):
    """Two networks in one module, as of a GAN: one forward uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = MLP(), MLP()
        self.use_left = True

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = (self.left if self.use_left else self.right)(inputs)
        return scores


def alternate(rank: int, world: int, stale: bool) -> None:
    halves = Halves()
    model = DDP(halves, find_unused_parameters=True, bucket_cap_mb=SMALL_BUCKETS)
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in (halves.right, halves.left)]
    with attached(model, "int4") as handle:
        for step in range(12):
            halves.use_left = step % 2 == 1
            optimizer = optimizers[halves.use_left]
            idle = halves.right if halves.use_left else halves.left
            weights = parameters(idle)
            handle.engine.settle()
            before = {name: residual.clone() for name, residual in handle.engine.residuals.final().items()}
            # Who clears one half only has DDP send the other half's gradients again.
            optimizer.zero_grad() if stale else model.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            handle.engine.settle()
            for name, residual in handle.engine.residuals.final().items():
                active = name.startswith("left") == halves.use_left
                assert torch.equal(residual, before[name]) != active, (name, step)
            assert equal(parameters(idle), weights)
            assert stale or all(parameter.grad is None for parameter in idle.parameters())
            assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_an_idle_half_keeps_its_residual(workers: Workers, world: int, stale: bool) -> None:
    workers.run(alternate, world, stale=stale)


def idle_on_one_rank(rank: int, world: int) -> None:
    plain, ours = (DDP(Halves(), find_unused_parameters=True) for _ in range(2))
    with attached(ours, "none"):
        for step in range(4):
            gradients = []
            for model in (plain, ours):
                model.module.use_left = rank == 0
                model.zero_grad()
                loss_of(model, rank, step).backward()
                gradients.append([p.grad for p in model.parameters() if p.grad is not None])
            assert len(gradients[0]) == len(list(plain.parameters()))
            assert equal(gradients[0], gradients[1])


def test_parameters_that_one_rank_does_not_use(workers: Workers) -> None:
    workers.run(idle_on_one_rank)


def static_graph(rank: int, world: int) -> None:
    """The first step of a static graph is reduced after backward; it must count, and be taken, as any other."""
    models = [DDP(MLP(), static_graph=static, bucket_cap_mb=SMALL_BUCKETS) for static in (False, True)]
    name = "int4" if world == 2 else "none"  # who sums what in two shots follows from the buckets
    with attached(models[0], name) as plain, attached(models[1], name) as static:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for step in range(6):
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, rank, range(step, step + 1))
            assert same_on_all_ranks(models[1].parameters())
            for one, other in zip(parameters(models[0]), parameters(models[1]), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert plain.stats().steps == static.stats().steps == 6


@pytest.mark.parametrize("world", [2, 3])
def test_a_static_graph_is_synchronised_from_its_first_step(workers: Workers, world: int) -> None:
    workers.run(static_graph, world)


def many_optimizers(rank: int, world: int) -> None:
    model = DDP(MLP())
    layers = list(model.module)
    one = torch.optim.SGD(
        [{"params": layers[0].parameters()}, {"params": layers[2].parameters(), "lr": 0.2}], lr=0.1, momentum=0.9
    )
    two = torch.optim.AdamW([*layers[3].parameters(), *layers[5].parameters()])
    with attached(model, "topk", density=0.1) as handle:
        for step in range(4):
            one.zero_grad()
            two.zero_grad()
            loss_of(model, rank, step).backward()
            one.step()
            two.step()
            assert handle.stats().steps == handle.engine._step.number + 1 == step + 1
            assert same_on_all_ranks(model.parameters())


def test_groups_and_optimizers_do_not_advance_the_step(workers: Workers) -> None:
    workers.run(many_optimizers)


class Odd(nn.Module):
    """Frozen and shared parameters, one that is empty, and some of another dtype."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.shared = nn.Linear(13, 13)
        self.again = self.shared
        self.tied = nn.Linear(13, 13, bias=False)
        self.tied.weight = self.shared.weight
        self.last = nn.Linear(13, 7).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.tied(self.again(self.shared(self.frozen(x)))).to(torch.bfloat16))
        return scores.float() + self.empty.sum()


def odd_model(rank: int, world: int, name: str) -> None:
    plain, ours = DDP(Odd()), DDP(Odd())
    optimizers = []
    for model in (plain, ours):
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizers.append(torch.optim.SGD([{"params": frozen}, {"params": trained}], lr=0.01))
    with attached(ours, name, error_feedback=True) as handle:
        kept = ["empty", "last.bias", "last.weight", "shared.bias", "shared.weight"]
        assert sorted(handle.engine.residuals.final()) == kept
        for step in range(5):
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                train(model, optimizer, rank, range(step, step + 1))
            assert same_on_all_ranks(ours.parameters())
            if name == "none":
                assert equal(parameters(ours.module.shared), parameters(plain.module.shared))
        assert equal(parameters(ours.module.frozen), parameters(Odd().frozen))


@pytest.mark.parametrize("name", ["none", "int8", "powersgd", "topk", "randomk"])
def test_frozen_shared_and_mixed_parameters(workers: Workers, name: str) -> None:
    workers.run(odd_model, 2, name=name)


NO_EXCHANGE = "an optimizer stepped although no gradient was exchanged since its last step"


def unsynchronised(rank: int, world: int, way: str) -> None:
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model):
        for step in range(3):
            optimizer.zero_grad()
            if way == "module":
                loss_of(model.module, rank, step).backward()
            else:
                with model.no_sync():
                    loss_of(model, rank, step).backward()
            if step == 0:
                with pytest.warns(CommOptWarning, match=NO_EXCHANGE):
                    optimizer.step()
            else:
                optimizer.step()  # said once
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()  # nothing to step with, nothing to say


@pytest.mark.parametrize("way", ["module", "no_sync"])
def test_a_step_without_an_exchange_is_said_once(workers: Workers, way: str) -> None:
    workers.run(unsynchronised, 2, way=way)


def another_model(rank: int, world: int) -> None:
    model, other = DDP(MLP()), MLP()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with attached(model):
        loss_of(other, rank, 0).backward()
        optimizer.step()  # none of ours


class WithoutRate(torch.optim.Optimizer):
    """As some that find it themselves (Adafactor)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= 0.01 * p.grad


def without_rate(rank: int, world: int) -> None:
    model = DDP(MLP())
    with attached(model, "int8"):
        train(model, WithoutRate(model.parameters()), rank, range(2))
        assert same_on_all_ranks(model.parameters())


def test_an_optimizer_may_have_no_learning_rate(workers: Workers) -> None:
    workers.run(without_rate)


def test_an_optimizer_of_another_model_is_none_of_ours(workers: Workers) -> None:
    workers.run(another_model)


def compiled(rank: int, world: int, outer: bool) -> None:
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, "int4") as handle:
        call = torch.compile((lambda inputs: model(inputs)) if outer else model, backend="eager")
        for step in range(4):
            optimizer.zero_grad()
            loss_of(call, rank, step).backward()
            optimizer.step()
        assert handle.stats().steps == 4
        assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("outer", [False, True])
def test_a_compiled_model_is_exchanged(workers: Workers, outer: bool) -> None:
    workers.run(compiled, 2, outer=outer)


def joined(rank: int, world: int, name: str) -> None:
    """A rank whose data end early takes part in the steps of the others; what it kept is delivered once."""
    model, local = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS), MLP()
    seen = [torch.zeros_like(parameter) for parameter in local.parameters()]
    delivered = [torch.zeros_like(parameter) for parameter in local.parameters()]
    with attached(model, name, error_feedback=True) as handle:
        with model.join(divide_by_initial_world_size=True):
            for step in range(12 if rank == 0 else 4):
                for each, sums in ((local, seen), (model, delivered)):
                    each.zero_grad()
                    loss_of(each, rank, step).backward()
                    for total, parameter in zip(sums, each.parameters(), strict=True):
                        assert parameter.grad is not None
                        total += parameter.grad
        if handle._unfinished:
            handle._finish()
        handle.engine.settle()
        kept = handle.engine.residuals.final()
        for index, (key, _) in enumerate(local.named_parameters()):
            got = summed(delivered[index] if rank == 0 else torch.zeros_like(delivered[index])) + summed(kept[key])
            torch.testing.assert_close(got, summed(seen[index]) / world, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["int4", "topk", "powersgd"])
def test_uneven_inputs_with_join(workers: Workers, name: str) -> None:
    workers.run(joined, 2, name=name)


def two_models(rank: int, world: int) -> None:
    """Generator and discriminator, each in a DDP of its own."""
    models = [DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with attached(models[0], "int4") as one, attached(models[1], "powersgd") as other:
        for step in range(6):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
                assert same_on_all_ranks(model.parameters())
        assert one.stats().steps == other.stats().steps == 6


def test_two_models_side_by_side(workers: Workers) -> None:
    workers.run(two_models)


def subgroup(rank: int, world: int) -> None:
    """A model that some ranks train: their peers take no part."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[rank % 2]
    model = DDP(MLP(), process_group=mine)
    with attached(model, "int4") as handle:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(5))
        assert handle.engine.wire.world == (2 if rank != 1 else 1)
        assert handle.stats().steps == 5
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.empty_like(weights) for _ in range(3)]
    dist.all_gather(every, weights)
    assert torch.equal(every[0], every[2])
    assert not torch.equal(every[0], every[1])


def test_a_model_of_a_subgroup(workers: Workers) -> None:
    workers.run(subgroup, 3)


class Waves(nn.Module):
    """Complex weights beside real ones of two widths, a scalar among them."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        super().__init__()
        self.phase = nn.Parameter(torch.randn(13, 7, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.ones(()))
        self.wide = nn.Parameter(torch.randn(13, 7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x.to(torch.complex64) @ self.phase).abs() + (x.double() @ self.wide).float()


def complex_model(rank: int, world: int, name: str, as_view: bool) -> None:
    plain, ours = DDP(Waves()), DDP(Waves(), gradient_as_bucket_view=as_view)
    with attached(ours, name) as handle:
        for step in range(3):
            for model in (plain, ours):
                train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(step, step + 1))
            reals = [torch.view_as_real(p) if p.is_complex() else p for p in ours.parameters()]
            assert same_on_all_ranks(reals)
        if name == "none":
            assert equal(parameters(ours), parameters(plain))
        else:
            assert not equal(parameters(ours)[:1], parameters(plain)[:1])  # complex gradients are compressed too
            assert handle.stats().compression_ratio > 1


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize(("name", "world"), [("none", 2), ("int8", 2), ("int4", 3)])
def test_complex_parameters_are_pairs_of_real_ones(workers: Workers, name: str, world: int, as_view: bool) -> None:
    workers.run(complex_model, world, name=name, as_view=as_view)


class Uneven(MLP):
    """A layer that DDP is told to leave alone, of another shape on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.local = nn.Linear(rank + 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x + 0 * self.local.weight.sum()


def ignored_by_ddp(rank: int, world: int) -> None:
    module = Uneven(rank)
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["local.weight", "local.bias"])
    model = DDP(module)
    with attached(model, "int4") as handle:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(3))
        assert same_on_all_ranks(p for name, p in module.named_parameters() if "local" not in name)
        assert not any("local" in name for name in handle.engine.residuals.final())


def test_what_ddp_ignores_is_ignored(workers: Workers) -> None:
    workers.run(ignored_by_ddp)


def frozen_late(rank: int, world: int) -> None:
    model = DDP(MLP(), find_unused_parameters=True)
    model.module[0].requires_grad_(False)
    with attached(model, "int4"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(3))
        assert same_on_all_ranks(model.parameters())
        assert equal(parameters(model.module[0]), parameters(MLP()[0]))


def test_parameters_frozen_after_the_model_was_wrapped(workers: Workers) -> None:
    workers.run(frozen_late)
