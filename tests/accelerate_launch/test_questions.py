"""The questions, and the file that they end in: `commopt launch` takes it."""

import io
import os
import sys
from pathlib import Path

import pytest
import torch

from accelerate_commopt import launch, questions
from accelerate_commopt.file import LaunchFile
from commopt import CommOptConfig

ALL_AS_PROPOSED = 6  # questions


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def answered(monkeypatch: pytest.MonkeyPatch, *answers: str, file: str = "launch.yaml") -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{answer}\n" for answer in answers)))
    return questions.main([file])


def test_what_is_proposed_is_two_processes_here_and_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, *[""] * ALL_AS_PROPOSED) == 0
    found = LaunchFile.read("launch.yaml")
    assert found.config == CommOptConfig()
    assert found.accelerate == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU",
        "use_cpu": True,
        "num_processes": 2,
        "num_machines": 1,
        "mixed_precision": "no",
    }
    assert questions.main(["--default", "default.yaml"]) == 0
    assert LaunchFile.read("default.yaml") == found


def test_with_gpus_all_of_them_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert answered(monkeypatch, *[""] * ALL_AS_PROPOSED) == 0
    found = LaunchFile.read("launch.yaml").accelerate
    assert (found["distributed_type"], found["use_cpu"], found["num_processes"]) == ("MULTI_GPU", False, 4)
    assert questions.main(["--default", "default.yaml"]) == 0
    assert LaunchFile.read("default.yaml").accelerate == found


def test_answers_reach_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = ["2", "1", "", "10.0.0.1", "29871"]
    assert answered(monkeypatch, *machines, "cpu", "0", "2", "bf16", "int4", "yes") == 0
    Path("train.py").write_text("")
    found = launch.prepare(["--config_file", "launch.yaml", "train.py"])
    assert found.environment["ACCELERATE_USE_CPU"] == "true"
    assert CommOptConfig("int4", error_feedback=True).to_environment().items() <= found.environment.items()
    expected = {"num_processes": 4, "num_machines": 2, "machine_rank": 1, "mixed_precision": "bf16"}
    address = {"main_process_ip": "10.0.0.1", "main_process_port": 29871}
    assert (expected | address).items() <= found.values.items()


def test_quality_is_asked_for_what_is_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, "1", "gpu", "1", "no", "auto", "aggressive") == 0
    found = LaunchFile.read("launch.yaml")
    assert found.config == CommOptConfig(quality="aggressive")
    assert (found.accelerate["distributed_type"], found.accelerate["num_processes"]) == ("NO", 1)


def test_without_an_answer_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answered(monkeypatch, "1", "cpu") == 1
    assert "no answer, so nothing was written" in capsys.readouterr().err
    monkeypatch.setattr(questions, "ask", interrupted)
    assert questions.main([]) == 1
    assert os.listdir() == []


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_a_file_is_overwritten_only_by_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("launch.yaml").write_text("mine")
    assert questions.main(["--default"]) == 2
    assert "launch.yaml exists: remove it" in capsys.readouterr().err
    assert answered(monkeypatch, *[""] * ALL_AS_PROPOSED, "") == 2  # no is proposed
    assert answered(monkeypatch, *[""] * ALL_AS_PROPOSED) == 1
    assert Path("launch.yaml").read_text() == "mine"
    assert answered(monkeypatch, *[""] * ALL_AS_PROPOSED, "y") == 0
    assert LaunchFile.read("launch.yaml").config == CommOptConfig()
    assert os.listdir() == ["launch.yaml"]


def test_a_write_that_fails_leaves_nothing_half_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("launch.yaml").mkdir()
    assert answered(monkeypatch, *[""] * ALL_AS_PROPOSED, "y") == 2
    assert "accelerate_commopt config: " in capsys.readouterr().err
    assert os.listdir() == ["launch.yaml"]
    assert questions.main(["--default", "missing/launch.yaml"]) == 2
