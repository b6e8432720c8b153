import json
from itertools import groupby
from pathlib import Path

from benchmarks.figures import DOCS, FIGURES, render

STEPTIME = {
    "command": "python -m benchmarks.steptime --rate 100mbit",
    "conditions": {"torch": "2.13.0", "hosts": 2},
    "variants": [
        {
            "variant": "nocomm",
            "step_ms": {"median": 280.4, "q25": 275.0, "q75": 290.0},
            "over": {
                "nocomm": {"median": 1.0, "min": 1.0, "max": 1.0},
                "ddp": {"median": 0.15, "min": 0.14, "max": 0.16},
            },
            "formula_bytes": 0.0,
            "counted_bytes": None,
            "kernel_bytes": 320.0,
            "wire_ms": None,
            "codec_ms": None,
        },
        {
            "variant": "powersgd:rank=4",
            "step_ms": {"median": 350.6, "q25": 340.0, "q75": 361.4},
            "over": {
                "nocomm": {"median": 1.251, "min": 1.2, "max": 1.3},
                "ddp": {"median": 0.1875, "min": 0.17, "max": 0.2},
            },
            "formula_bytes": 489000.0,
            "counted_bytes": 489472.0,
            "kernel_bytes": 498123.0,
            "wire_ms": 52.2,
            "codec_ms": 19.8,
            "predicted_ms": 371.6,
            "idle_wire": 0.25,
        },
    ],
}
PARITY = {
    "command": "python -m benchmarks.parity --seeds 0 1 2",
    "conditions": {"steps": 300},
    "runs": [
        {"variant": variant, "seed": seed, "val_loss": loss, "ms_per_step": 70.0}
        for variant, losses in {
            "ddp": (2.0, 2.5, 4.0),
            "int8": (2.002, 2.5025, 4.004),
            "onebit": (2.04, 2.5, 4.0),
            "topk:density=0.01,error_feedback=false": (2.4, 3.0, 4.8),
        }.items()
        for seed, loss in enumerate(losses)
    ],
}


def committed(name: str) -> str:
    return (DOCS / "figures" / f"{name}.json").read_text()


def test_the_page_shows_what_was_measured_and_how(tmp_path: Path) -> None:
    made = {"policy-100mbit-2": STEPTIME, "policy-loopback-2": STEPTIME, "parity": PARITY}
    for name in {figure.name for figure in FIGURES}:
        if name in made or (DOCS / "figures" / f"{name}.json").exists():
            text = json.dumps(made[name]) if name in made else committed(name)
            (tmp_path / f"{name}.json").write_text(text)
    page = render(tmp_path).splitlines()
    assert page[0] == "# Figures"
    assert "python -m benchmarks.steptime --rate 100mbit" in page
    assert "torch: 2.13.0; hosts: 2" in page
    assert "| `nocomm` | 280 | 275-290 |  | 1.00 | 1.00-1.00 | 0.15 | 0.14-0.16 |  |  |  | 0.000 |  | 0.000 |" in page
    powersgd = "351 | 340-361 | 372 | 1.25 | 1.20-1.30 | 0.19 | 0.17-0.20 | 0.25 | 52 | 20 | 0.489 | 0.489 | 0.498"
    assert f"| `powersgd:rank=4` | {powersgd} |" in page
    assert "python -m benchmarks.parity --seeds 0 1 2" in page
    assert "| `ddp` | 3 | 2.8333 |  |  |  |  | 70 |" in page
    assert "| `int8` | 3 | 2.8362 | +0.10 % | +0.10 to +0.10 % | 0.2 % | pass | 70 |" in page
    assert "| `onebit` | 3 | 2.8467 | +0.67 % | -2.20 to +3.54 % | 0.5 % | FAIL | 70 |" in page
    control = "topk:density=0.01,error_feedback=false"
    assert f"| `{control}` | 3 | 3.4000 | +20.00 % | +20.00 to +20.00 % | 0.5 % | fails, as it must | 70 |" in page
    for is_table, lines in groupby(page, lambda line: line.startswith("| ")):
        assert not is_table or len({line.count("|") for line in lines}) == 1  # a table has one number of columns


def test_the_committed_page_is_that_of_the_committed_figures() -> None:
    assert (DOCS / "figures.md").read_text() == render(DOCS / "figures")
