"""Train a GPT on real text: one file, from the characters to the learning-rate schedule.

    python -m recipes.gpt.train --devices 2                                  # compressed gradients, two processes
    python -m recipes.gpt.train --devices 2 --strategy ddp                   # the same with plain DDP
    python -m recipes.gpt.train --devices 2 --compressor powersgd --option rank=4

The text is the language reference that comes with Python; ``--text FILE`` takes any other. Losses, perplexity and the
time of every step go to ``metrics.csv`` in ``--out``. See README.md beside this file.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data import topics
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

# ---------------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. 256 tokens are all the bytes there are."""

    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 6
    n_head: int = 4
    n_embd: int = 256


SIZES: dict[str, GPTConfig] = {
    "tiny": GPTConfig(block_size=64, n_layer=5, n_embd=128),  # 1.0 M parameters
    "small": GPTConfig(),  # 4.8 M
    "gpt2": GPTConfig(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768),  # 124 M
}


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron; each is added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(-2))
        x = x + self.contract(F.gelu(self.expand(self.norm2(x))))
        return x


class GPT(nn.Module):
    """GPT-2's architecture: learned positions, normalisation first, output weights tied to the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.norm = nn.LayerNorm(config.n_embd)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # what is added to the residual stream starts smaller, the deeper the model
                residual = name.endswith(("attended.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocab_size] of the token after each of ``tokens``, int64 [B, T] with T <= block_size."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token, of logits [B, T, V] and the tokens [B, T] that did follow."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ----------------------------------------------------------------------------------------------------------- the text


def load_text(path: Path | None = None, level: str = "byte") -> tuple[Tensor, Tensor]:
    """Training and validation tokens (int64, 1-D): the first nine tenths of a text and its last tenth.

    Without a ``path``, the text is Python's own language reference. ``level`` is "byte", or "char" for one token a
    distinct character of the text.
    """
    if path is not None:
        text = path.read_text(encoding="utf-8")
    else:  # its topics repeat one another: what is validated on must not have been trained on
        text = "\n\n".join(dict.fromkeys("\n\n".join(topics.topics.values()).split("\n\n")))
    if level == "byte":
        tokens = torch.tensor(list(text.encode()))
    else:
        vocabulary = {character: token for token, character in enumerate(sorted(set(text)))}
        tokens = torch.tensor([vocabulary[character] for character in text])
    split = len(tokens) * 9 // 10
    return tokens[:split], tokens[split:]


def batches(
    tokens: Tensor, block_size: int, batch_size: int, seed: int = 0, rank: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random batches: inputs and targets, int64 [batch_size, block_size] each. Every rank draws its own."""
    generator = torch.Generator().manual_seed(seed + 1_000_003 * rank)
    offsets = torch.arange(block_size + 1)
    while True:
        starts = torch.randint(len(tokens) - block_size, (batch_size, 1), generator=generator)
        windows = tokens[starts + offsets]
        yield windows[:, :-1], windows[:, 1:]


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """``count`` random batches of a rank: the same for the same index, so that a run can go back and be repeated."""

    def __init__(
        self, tokens: Tensor, block_size: int, batch_size: int, count: int, seed: int = 0, rank: int = 0
    ) -> None:
        self.tokens, self.block_size, self.batch_size = tokens, block_size, batch_size
        self.count, self.seed, self.rank = count, seed, rank

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [batch_size, block_size] each."""
        return next(batches(self.tokens, self.block_size, self.batch_size, self.seed + 7919 * index, self.rank))


def windows(tokens: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The text cut into inputs and targets, int64 [len(tokens) // block_size, block_size] each, without overlap."""
    count = (len(tokens) - 1) // block_size
    return tokens[: count * block_size].view(count, -1), tokens[1 : count * block_size + 1].view(count, -1)


class TextData(pl.LightningDataModule):
    """Random batches to train on; for validation every rank takes its share of the windows, each exactly once."""

    def __init__(
        self, train: Tensor, validation: Tensor, block_size: int, batch_size: int, count: int, seed: int
    ) -> None:
        super().__init__()
        self.train, self.validation = train, validation
        self.block_size, self.batch_size, self.count, self.seed = block_size, batch_size, count, seed

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        assert self.trainer is not None
        rank = self.trainer.global_rank
        data = Batches(self.train, self.block_size, self.batch_size, self.count, self.seed, rank)
        return DataLoader(data, batch_size=None)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        assert self.trainer is not None
        mine = slice(self.trainer.global_rank, None, self.trainer.world_size)
        shares = (part[mine] for part in windows(self.validation, self.block_size))
        return DataLoader(TensorDataset(*shares), self.batch_size)


# ------------------------------------------------------------------------------------------------------- the training


class LitGPT(pl.LightningModule):
    """The GPT with its loss, its metrics and its optimizer."""

    def __init__(self, config: GPTConfig, lr: float, warmup: int) -> None:
        super().__init__()
        self.model = GPT(config)
        self.lr, self.warmup = lr, warmup
        self.val_loss, self.perplexity = MeanMetric(), Perplexity()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = next_token_loss(self.model(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_start(self) -> None:
        for metric in (self.val_loss, self.perplexity):  # bf16-true converts them too; a bf16 sum soon stops growing
            metric.set_dtype(torch.float32)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        logits = self.model(inputs).float()
        self.val_loss.update(next_token_loss(logits, targets), weight=targets.numel())
        self.perplexity.update(logits, targets)
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_perplexity", self.perplexity)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, self.warmup, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """Share of the peak learning rate: a line up to 1, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.55 + 0.45 * math.cos(math.pi * progress)


class StepCost(pl.Callback):
    """Logs the seconds of training so far, and the milliseconds and sent bytes of each optimizer step.

    Validation does not count. Only commopt's strategies count bytes.
    """

    def __init__(self) -> None:
        self.seconds = self.at_last_step = self.sent = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seconds += time.perf_counter() - self.began
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return  # in the middle of an optimizer step
        module.log("seconds", self.seconds)
        module.log("ms_per_step", 1000 * (self.seconds - self.at_last_step), prog_bar=True)
        self.at_last_step = self.seconds
        if handle := getattr(trainer.strategy, "handle", None):
            sent = handle.stats().bytes_sent
            module.log("sent_mb", (sent - self.sent) / 1e6)
            self.sent = sent


def make_strategy(name: str, compressor: str | None, options: dict[str, Any]) -> str | Strategy:
    """What ``Trainer(strategy=...)`` takes: a registered name, or ours with a compressor of choice."""
    if not name.startswith("commopt"):
        return name
    import lightning_commopt

    if compressor is None:
        return name
    return lightning_commopt.CommOptDDPStrategy(compressor=compressor, **options)


def parse_option(text: str) -> tuple[str, Any]:
    """``rank=4`` as a name and a number, a truth value (``true``) or, where it is neither, a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.gpt.train",
        description="Train a GPT on real text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--text", type=Path, help="a UTF-8 file; Python's language reference when left out")
    parser.add_argument("--level", choices=("byte", "char"), default="byte", help="what a token is")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=5, help="windows of text, per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches an optimizer step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps until the peak")
    parser.add_argument("--val-every", type=int, default=50, help="steps from one validation to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="commopt_ddp", help="a name that Lightning knows, such as ddp")
    parser.add_argument("--compressor", help="with commopt_ddp: what compresses the gradients (int8, powersgd, ...)")
    parser.add_argument(
        "--option", type=parse_option, action="append", default=[], metavar="NAME=VALUE", help="for the compressor"
    )
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1, help="ranks on each node")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--precision", default="32-true", help="or bf16-mixed, bf16-true, ...")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for metrics.csv")
    args = parser.parse_args()
    if args.compressor and args.strategy != "commopt_ddp":
        parser.error("--compressor goes with --strategy commopt_ddp")
    if args.option and not args.compressor:
        parser.error("--option goes with --compressor")
    return args


def main() -> None:
    args = parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")  # the text is in memory
    pl.seed_everything(args.seed)
    train, validation = load_text(args.text, args.level)
    config = SIZES[args.size]
    distinct = int(max(train.max(), validation.max())) + 1
    config = replace(config, vocab_size=max(config.vocab_size, distinct))
    batches_in_all = args.steps * args.accumulate
    trainer = pl.Trainer(
        strategy=make_strategy(args.strategy, args.compressor, dict(args.option)),
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        precision=args.precision,
        max_epochs=1,
        val_check_interval=min(args.val_every * args.accumulate, batches_in_all),
        num_sanity_val_steps=0,
        accumulate_grad_batches=args.accumulate,
        use_distributed_sampler=False,  # TextData gives every rank its share
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(args.out.parent, args.out.name, version="", flush_logs_every_n_steps=1),
        callbacks=[RichProgressBar(), StepCost()],
        enable_checkpointing=False,
    )
    data = TextData(train, validation, config.block_size, args.batch_size, batches_in_all, args.seed)
    trainer.fit(LitGPT(config, args.lr, args.warmup), datamodule=data)


if __name__ == "__main__":
    main()
