"""Train the GPT of `train.py` with Accelerate: a plain loop, and one line for compressed gradients.

    torchrun --nproc-per-node 2 -m recipes.gpt.train_accelerate --cpu
    torchrun --nproc-per-node 2 -m recipes.gpt.train_accelerate --cpu --compressor powersgd --option rank=4
    accelerate launch --num_processes 8 -m recipes.gpt.train_accelerate --size gpt2 --mixed-precision bf16

The same model, text, batches and hyperparameters, and therefore the same losses.
"""

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import set_seed  # type: ignore[import-untyped]

from accelerate_commopt import attach
from commopt.errors import CommOptError
from recipes.gpt.train import GPT, SIZES, Batches, load_text, next_token_loss, parse_option, warmup_cosine, windows

EVALUATION_BATCH = 32


def train(args: argparse.Namespace) -> dict[str, float]:
    """On every rank: trains, writes ``metrics.csv``, and returns what its last row holds."""
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        step_scheduler_with_optimizer=False,  # it would take as many steps as there are ranks
    )
    attachment = attach(accelerator, args.compressor or "auto", directory=args.out, **dict(args.option))

    set_seed(args.seed)
    text, held_out = load_text(args.text, args.level)
    distinct = int(max(text.max(), held_out.max())) + 1
    config = replace(SIZES[args.size], vocab_size=max(SIZES[args.size].vocab_size, distinct))
    rank, world = accelerator.process_index, accelerator.num_processes
    data = Batches(text, config.block_size, args.batch_size, args.steps * args.accumulate, args.seed, rank)
    validation = [part[rank::world] for part in windows(held_out, config.block_size)]

    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, args.warmup, args.steps))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    @torch.no_grad()
    def validate() -> float:
        """Mean loss of all windows of the text; ranks share the work."""
        total = torch.zeros(2, device=accelerator.device)
        for inputs, targets in zip(*(part.split(EVALUATION_BATCH) for part in validation), strict=True):
            inputs, targets = inputs.to(accelerator.device), targets.to(accelerator.device)
            loss = next_token_loss(accelerator.unwrap_model(model)(inputs).float(), targets)
            total += torch.stack([loss * targets.numel(), torch.tensor(float(targets.numel()), device=loss.device)])
        total = accelerator.reduce(total)
        return float(total[0] / total[1])

    rows: list[dict[str, float]] = []
    seconds = 0.0
    for step in range(args.steps):
        began = time.perf_counter()
        for index in range(step * args.accumulate, (step + 1) * args.accumulate):
            with accelerator.accumulate(model):  # gradients travel with the last of these
                inputs, targets = (part.to(accelerator.device) for part in data[index])
                loss = next_token_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        seconds += time.perf_counter() - began
        if (step + 1) % args.val_every == 0 or step + 1 == args.steps:
            stats = attachment.stats()
            row = {"step": step, "seconds": seconds, "sent_mb": stats.bytes_sent / 1e6}
            row |= {"uncompressed_mb": stats.bytes_uncompressed / 1e6, "train_loss": loss.item()}
            rows.append(row | {"val_loss": validate()})
            if accelerator.is_main_process:
                print("  ".join(f"{name} {value:.5g}" for name, value in rows[-1].items()))
    explained = attachment.explain()
    accelerator.end_training()

    if accelerator.is_main_process:
        print(explained)
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[-1])
            writer.writeheader()
            writer.writerows(rows)
    return rows[-1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, on what and how: also for `train_hf.py`."""
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
    parser.add_argument(
        "--compressor", help="what compresses the gradients (int8, powersgd, ...); measured if left out"
    )
    parser.add_argument(
        "--option", type=parse_option, action="append", default=[], metavar="NAME=VALUE", help="for the compressor"
    )
    parser.add_argument("--cpu", action="store_true", help="train on CPUs")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for what is logged")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.gpt.train_accelerate",
        description="Train a GPT on real text with Accelerate.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--mixed-precision", choices=("no", "fp16", "bf16"), default="no")
    args = parser.parse_args(arguments)
    if args.option and not args.compressor:
        parser.error("--option goes with --compressor")
    return args


def main() -> None:
    try:
        train(parse_args())
    except CommOptError as error:
        sys.exit(f"gpt: {error}")


if __name__ == "__main__":
    main()
