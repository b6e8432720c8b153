"""Small models, trained through Accelerate or by a Hugging Face Trainer inside the living workers."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from accelerate_commopt import Attachment
from commopt import CommOptWarning

SIZE = 4  # samples in a batch of one rank
INPUTS, OUTPUTS = 16, 4


class Samples(Dataset[dict[str, Tensor]]):
    """A regression that can be learned: ``x`` ``[INPUTS]`` and ``y`` ``[OUTPUTS]``, float32."""

    def __init__(self, count: int) -> None:
        numbers = torch.Generator().manual_seed(7)
        truth = torch.randn(INPUTS, OUTPUTS, generator=numbers)
        self.x = torch.randn(count, INPUTS, generator=numbers)
        self.y = self.x @ truth

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Regression(nn.Module):
    """Two layers and a dropout, whose loss is in what ``forward`` gives, as the Trainer wants it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(INPUTS, 256), nn.Tanh(), nn.Dropout(dropout), nn.Linear(256, OUTPUTS))
        self.losses: list[float] = []

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)


def loader_of(steps: int, world: int) -> DataLoader[dict[str, Tensor]]:
    """``steps`` batches for each of ``world`` ranks, when Accelerate has dealt them out."""
    return DataLoader(Samples(steps * world * SIZE), batch_size=SIZE)


@contextmanager
def ranks_of_the_group(rank: int, world: int) -> Iterator[None]:
    """What torchrun and ``accelerate launch --cpu`` say; and Accelerate's singletons are new."""
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]

    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    said = {name: str(value) for name, value in names.items()}
    with mock.patch.dict(os.environ, said | {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "29500"}):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@contextmanager
def accelerator_of(rank: int, world: int, **kwargs: Any) -> Iterator[Any]:
    """An Accelerator of one rank; what is attached to it is closed."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    with ranks_of_the_group(rank, world):
        accelerator = Accelerator(cpu=True, **kwargs)
        try:
            yield accelerator
        finally:
            if hasattr(accelerator, "_commopt"):
                accelerator._commopt.close()


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any = None) -> None:
    """What a user of Accelerate writes."""
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()


def flat(model: nn.Module) -> Tensor:
    """A copy of all parameters, ``[numel]`` float32."""
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def trainer_of(
    model: nn.Module, folder: str | Path, steps: int, world: int, eval_dataset: Any = None, **arguments: Any
) -> Any:
    """A Trainer on the CPU without decoration, for ``steps`` steps of one epoch, or of those in ``arguments``."""
    from transformers import Trainer

    from tests.accelerate.arguments import OnCpu

    plain: dict[str, Any] = {
        "per_device_train_batch_size": SIZE,
        "num_train_epochs": 1,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
        "label_names": ["y"],
        "remove_unused_columns": False,
    }
    optimizer = sgd(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    accumulate = arguments.get("gradient_accumulation_steps", 1)
    data = Samples(steps * world * SIZE * accumulate)
    trainer: Any = Trainer(
        model,
        OnCpu(str(folder), **(plain | arguments)),
        train_dataset=data,
        eval_dataset=eval_dataset,
        optimizers=(optimizer, constant),
    )
    trainer._get_train_sampler = lambda *_: SequentialSampler(data)  # the argument for it is of transformers 5
    return trainer


@contextmanager
def closing(attachment: Attachment) -> Iterator[Attachment]:
    try:
        yield attachment
    finally:
        attachment.close()


def heard(action: Callable[[], object]) -> list[str]:
    """What commopt warned of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=CommOptWarning)
        action()
    return [str(warning.message) for warning in caught if issubclass(warning.category, CommOptWarning)]
