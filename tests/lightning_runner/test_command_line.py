"""What a LightningCLI that knows nothing of commopt says of our strategies, and to mistakes about them."""

from pathlib import Path

import pytest

from lightning_commopt.__main__ import main
from tests.lightning_runner.programs import CLI, forgotten

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse, as Lightning calls it


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("train.py").write_text(CLI.replace("PACKAGE", "lightning.pytorch"))


def said(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int) -> str:
    with forgotten(), pytest.raises(SystemExit) as caught:
        main(["train.py", "fit", *arguments])
    assert caught.value.code == status
    captured = capsys.readouterr()
    return " ".join((captured.err if status else captured.out).split())


def test_help_has_the_types_and_what_they_mean(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, ["--trainer.strategy.help", "CommOptDDPStrategy"], 0)
    for line in (
        "--trainer.strategy.compressor COMPRESSOR a registered name, see ``commopt.compressors.available()``, or",
        "--trainer.strategy.quality {lossless,safe,aggressive} what",
        "(type: Optional[int], default: null)",
        'share of the elements that travel, above 0 and up to 1, of ``"topk"``, ``"threshold"``, ``"randomk"``. (type: '
        "Optional[float], default: null)",
        "--trainer.strategy.bucket_cap_mb BUCKET_CAP_MB (type: float, default: 3",
        "--trainer.strategy.process_group_backend PROCESS_GROUP_BACKEND (type: Optional[str], default: null)",
    ):
        assert line in text
    assert "ddp_comm_hook" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("powersgd, rnak: 4", "unknown argument of the strategy: 'rnak'; did you mean 'rank'?"),
        ("int8, process_group_backnd: gloo", "'process_group_backnd'; did you mean 'process_group_backend'?"),
        ("powersgd, rank: much", "Expected a <class 'int'>"),
        ("topk, density: [1]", "Expected a <class 'float'>"),
        ("int8, quality: best", 'Parser key "quality"'),
        ("int8, timeout: soon", 'Parser key "timeout"'),
    ],
)
def test_a_mistake_in_a_file_is_named(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    strategy = f"{{class_path: lightning_commopt.CommOptDDPStrategy, init_args: {{compressor: {arguments}}}}}"
    Path("trainer.yaml").write_text(f"trainer: {{accelerator: cpu, strategy: {strategy}}}")
    assert message in said(capsys, ["--config", "trainer.yaml"], 2)


def test_and_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--trainer.strategy", "CommOptDDPStrategy", "--trainer.strategy.densty", "0.1"]
    assert "unknown argument of the strategy: 'densty'; did you mean 'density'?" in said(capsys, given, 2)
    assert "did you mean" not in said(capsys, ["--model.wdth", "4"], 2)  # not ours


def test_what_only_the_compressor_knows_is_named_too() -> None:
    given = ["--trainer.strategy", "CommOptDDPStrategy", "--trainer.strategy.compressor"]
    for values, message in (
        (["powersdg"], "unknown compressor 'powersdg'; did you mean 'powersgd'"),
        (["topk", "--trainer.strategy.density", "7"], "'density' "),
    ):
        with forgotten(), pytest.raises(ValueError, match=message):
            main(["train.py", "fit", "--seed_everything=1", *given, *values])
