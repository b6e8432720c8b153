"""Train GPT-2 with the Hugging Face Trainer: their model with random weights, our text, one line for commopt.

    torchrun --nproc-per-node 2 -m recipes.gpt.train_hf --cpu
    torchrun --nproc-per-node 2 -m recipes.gpt.train_hf --cpu --compressor powersgd --option rank=4

Nothing is fetched from a hub.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from accelerate_commopt import attach
from commopt.errors import CommOptError
from recipes.gpt.train import SIZES, load_text, windows
from recipes.gpt.train_accelerate import EVALUATION_BATCH, add_arguments


class Windows(Dataset[dict[str, Tensor]]):
    """A text cut into pieces without overlap, int64 [block_size] each; the model shifts labels by itself."""

    def __init__(self, tokens: Tensor, block_size: int) -> None:
        self.tokens, _ = windows(tokens, block_size)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank: trains, writes ``log.json``, and returns what was logged."""
    arguments = TrainingArguments(
        str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        per_device_eval_batch_size=EVALUATION_BATCH,
        learning_rate=args.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=args.warmup,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=min(args.val_every, args.steps),
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        seed=args.seed,
        use_cpu=args.cpu,
        bf16=args.bf16,
        dataloader_pin_memory=not args.cpu,
        ddp_find_unused_parameters=False,
    )
    set_seed(args.seed)
    text, held_out = load_text(args.text, args.level)
    distinct = int(max(text.max(), held_out.max())) + 1
    shape = SIZES[args.size]
    config = GPT2Config(
        vocab_size=max(shape.vocab_size, distinct),
        n_positions=shape.block_size,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,  # a text of bytes has no such tokens
        eos_token_id=None,
        use_cache=False,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=Windows(text, shape.block_size),
        eval_dataset=Windows(held_out, shape.block_size),
    )
    attachment = attach(trainer, args.compressor or "auto", **dict(args.option))
    trainer.train()

    stats = attachment.stats()
    sent = {"sent_mb": stats.bytes_sent / 1e6, "uncompressed_mb": stats.bytes_uncompressed / 1e6}
    log = [*trainer.state.log_history, {"step": args.steps, **sent}]
    if trainer.is_world_process_zero():
        print(attachment.explain(), sent)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "log.json").write_text(json.dumps(log, indent=1))
    attachment.close()
    return log


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.gpt.train_hf",
        description="Train GPT-2 on real text with the Hugging Face Trainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
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
