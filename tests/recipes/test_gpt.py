"""The GPT recipe: its model, its text and its batches."""

import argparse
import math
from itertools import islice
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from recipes.gpt.train import (
    GPT,
    SIZES,
    Batches,
    GPTConfig,
    LitGPT,
    TextData,
    batches,
    load_text,
    parse_option,
    warmup_cosine,
    windows,
)

TINY = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)


def test_forward_gives_a_logit_for_every_token_of_the_vocabulary() -> None:
    model = GPT(TINY)
    assert model(torch.randint(11, (3, 8))).shape == (3, 8, 11)
    assert model(torch.randint(11, (3, 5))).shape == (3, 5, 11)
    assert not list(model.buffers())  # DDP has nothing to broadcast before a step


def test_no_token_sees_a_later_one() -> None:
    model = GPT(TINY)
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize(("size", "millions"), [("tiny", 1.0), ("small", 4.8), ("gpt2", 124.4)])
def test_sizes_have_the_parameters_they_are_named_for(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = GPT(SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.05)


def test_one_batch_can_be_learned() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = next(batches(torch.randint(11, (100,)), 8, 4))
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("level", ["byte", "char"])
def test_text_is_split_once_nine_to_one(level: str, tmp_path: Path) -> None:
    text = "äöü and then the rest. " * 50
    (tmp_path / "text").write_text(text, encoding="utf-8")
    train, validation = load_text(tmp_path / "text", level)
    whole = torch.cat([train, validation])
    assert len(train) == len(whole) * 9 // 10
    if level == "byte":
        assert bytes(whole.tolist()).decode() == text
    else:
        assert len(whole) == len(text)
        assert whole.max() + 1 == len(whole.unique()) == len(set(text))


def test_default_text_is_validated_on_paragraphs_never_trained_on() -> None:
    train, validation = (bytes(part.tolist()) for part in load_text())
    assert len(train) > 300_000
    assert len(validation) > 30_000
    whole_paragraphs = validation.split(b"\n\n")[1:]
    assert not set(whole_paragraphs) & set(train.split(b"\n\n"))


def test_batches_follow_from_seed_and_rank() -> None:
    tokens = torch.arange(1000)

    def first_two(seed: int, rank: int) -> torch.Tensor:
        return torch.stack([inputs for inputs, _ in islice(batches(tokens, 16, 4, seed, rank), 2)])

    assert torch.equal(first_two(0, 0), first_two(0, 0))
    assert not torch.equal(first_two(0, 0), first_two(0, 1))
    assert not torch.equal(first_two(0, 0), first_two(1, 0))
    assert not torch.equal(first_two(0, 0)[0], first_two(0, 0)[1])


def test_a_batch_can_be_drawn_again() -> None:
    tokens = torch.arange(1000)
    ours, theirs = (Batches(tokens, 16, 4, count=5, seed=3, rank=rank) for rank in range(2))
    assert len(ours) == 5
    assert torch.equal(ours[4][0], ours[4][0])
    assert not torch.equal(ours[4][0], ours[3][0])
    assert not torch.equal(ours[4][0], theirs[4][0])


def test_targets_are_the_inputs_one_token_later() -> None:
    tokens = torch.arange(18)
    inputs, targets = next(batches(tokens, block_size=16, batch_size=64))
    assert torch.equal(targets, inputs + 1)
    assert (int(inputs.min()), int(targets.max())) == (0, 17)  # the first token and the last are both reached


def test_windows_cover_the_text_without_overlap() -> None:
    inputs, targets = windows(torch.arange(33), block_size=8)
    assert torch.equal(inputs.flatten(), torch.arange(32))
    assert torch.equal(targets, inputs + 1)
    assert windows(torch.arange(32), block_size=8)[0].shape == (3, 8)  # the 32nd token has no successor


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_validation_covers_the_split_in_any_precision() -> None:
    tokens = torch.randint(11, (8_000,))
    losses = {}
    for precision in ("32-true", "bf16-true"):
        torch.manual_seed(0)
        data = TextData(tokens, tokens, TINY.block_size, 2, count=1, seed=0)  # so many windows that a bf16 sum stalls
        trainer = pl.Trainer(
            accelerator="cpu", precision=precision, logger=False, enable_progress_bar=False, enable_model_summary=False
        )
        (metrics,) = trainer.validate(LitGPT(TINY, lr=1e-3, warmup=0), data, verbose=False)
        losses[precision] = metrics["val_loss"]
        assert math.log(metrics["val_perplexity"]) == pytest.approx(metrics["val_loss"], rel=1e-3)
    assert losses["32-true"] == pytest.approx(math.log(11), rel=0.01)
    assert losses["bf16-true"] == pytest.approx(losses["32-true"], rel=0.005)


def test_learning_rate_rises_to_its_peak_and_falls_to_a_tenth() -> None:
    rates = [warmup_cosine(step, warmup=10, steps=100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == max(rates) == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert warmup_cosine(0, warmup=0, steps=0) == pytest.approx(1.0)


def test_options_are_numbers_truth_values_or_text() -> None:
    texts = ["rank=4", "density=0.01", "stochastic=true", "name=value"]
    assert [parse_option(text) for text in texts] == [
        ("rank", 4),
        ("density", 0.01),
        ("stochastic", True),
        ("name", "value"),
    ]
    with pytest.raises(argparse.ArgumentTypeError, match="name=value"):
        parse_option("rank")
