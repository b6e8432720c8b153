"""The recipes train: through Lightning, Accelerate and the Hugging Face Trainer, on two ranks, for a few steps."""

import csv
import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.accelerate.training import ranks_of_the_group
from tests.workers import Workers

RESNET = ["--data", "digits", "--width", "8", "--steps", "8", "--warmup", "2", "--val-every", "4", "--batch-size", "16"]
GPT = ["--size", "tiny", "--steps", "4", "--warmup", "2", "--val-every", "2", "--batch-size", "2"]
INT8 = ["--compressor", "int8"]


def resnet_by_lightning(rank: int, world: int, arguments: list[str]) -> dict[str, float]:
    import lightning.pytorch as pl

    from recipes.gpt.train import make_strategy
    from recipes.resnet.resnet import ResNet, load_images
    from recipes.resnet.train import ImageData, LitResNet, parse_args
    from tests.lightning.fits import handle_of, make_trainer, rank_of_the_group

    with mock.patch.object(sys, "argv", ["train", *arguments]):
        args = parse_args()
    pl.seed_everything(args.seed)
    train, validation = load_images(args.data)
    with rank_of_the_group(rank):
        strategy = make_strategy(args.strategy, args.compressor, dict(args.option))
        data = ImageData(train, validation, args.batch_size, args.steps, args.seed)
        module = LitResNet(ResNet(args.depth, 10, 1, args.width), args.lr, args.warmup, args.label_smoothing)
        trainer = make_trainer(world, strategy, use_distributed_sampler=False)
        trainer.fit(module, datamodule=data)
        stats = handle_of(trainer).stats()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics | {"sent_mb": stats.bytes_sent / 1e6, "uncompressed_mb": stats.bytes_uncompressed / 1e6}


def resnet_by_accelerate(rank: int, world: int, arguments: list[str]) -> dict[str, float]:
    from recipes.resnet.train_accelerate import parse_args, train

    with ranks_of_the_group(rank, world):
        return train(parse_args([*arguments, "--cpu"]))


def gpt_by_accelerate(rank: int, world: int, arguments: list[str]) -> dict[str, float]:
    from recipes.gpt.train_accelerate import parse_args, train

    with ranks_of_the_group(rank, world):
        return train(parse_args([*arguments, "--cpu"]))


def gpt_by_trainer(rank: int, world: int, arguments: list[str]) -> list[dict[str, Any]]:
    from recipes.gpt.train_hf import parse_args, train

    with ranks_of_the_group(rank, world):
        return train(parse_args([*arguments, "--cpu"]))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_resnet_is_the_same_through_lightning_and_accelerate(workers: Workers, tmp_path: Path) -> None:
    arguments = [*RESNET, *INT8, "--out", str(tmp_path)]
    lightning = workers.run(resnet_by_lightning, arguments=arguments)
    accelerate = workers.run(resnet_by_accelerate, arguments=arguments)
    for first, second in zip(lightning, accelerate, strict=True):
        assert first["val_accuracy"] == pytest.approx(second["val_accuracy"])
        assert first["train_loss"] == pytest.approx(second["train_loss"])
        assert first["sent_mb"] == pytest.approx(second["sent_mb"], rel=0.01)
        assert first["sent_mb"] < 0.3 * first["uncompressed_mb"]
    assert lightning[0]["val_accuracy"] == lightning[1]["val_accuracy"] > 0  # over the images of both ranks
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["3", "7"]
    assert float(rows[-1]["val_accuracy"]) == accelerate[0]["val_accuracy"]


def test_the_gpt_trains_through_accelerate(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    arguments = [*GPT, "--text", str(tmp_path / "text"), "--accumulate", "2", "--out", str(tmp_path), *INT8]
    first, second = workers.run(gpt_by_accelerate, arguments=arguments)
    assert first["val_loss"] == second["val_loss"] < 5.0  # 5.5 before training
    assert first["train_loss"] != second["train_loss"]
    assert (
        first["sent_mb"] < 0.3 * first["uncompressed_mb"] == pytest.approx(0.3 * 4 * 4.1, rel=0.05)
    )  # not twice 4 steps
    assert (tmp_path / "metrics.csv").exists()


def test_the_gpt_of_transformers_trains_by_its_trainer(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    arguments = [*GPT, "--text", str(tmp_path / "text"), "--out", str(tmp_path), *INT8]
    first, second = workers.run(gpt_by_trainer, arguments=arguments)
    losses = [[entry["eval_loss"] for entry in log if "eval_loss" in entry] for log in (first, second)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert losses[0][1] < losses[0][0] < 5.6
    assert first[-1]["sent_mb"] < 0.3 * first[-1]["uncompressed_mb"]
    assert json.loads((tmp_path / "log.json").read_text())[-1] == first[-1]


@pytest.mark.parametrize("recipe", ["resnet.train", "resnet.train_accelerate", "gpt.train_accelerate", "gpt.train_hf"])
def test_an_option_needs_a_compressor(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"recipes.{recipe}")
    with mock.patch.object(sys, "argv", ["train", "--option", "rank=4"]), pytest.raises(SystemExit):
        module.parse_args()
    assert "--option goes with --compressor" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["resnet.train", "resnet.train_accelerate"])
@pytest.mark.filterwarnings("ignore:one process has nobody")
def test_a_missing_folder_ends_a_recipe_with_one_line(recipe: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"recipes.{recipe}")
    arguments = ["train", "--data", "imagefolder", "--data-dir", str(tmp_path / "nothing")]
    with mock.patch.object(sys, "argv", arguments), pytest.raises(SystemExit, match="resnet: there is no folder"):
        module.main()
