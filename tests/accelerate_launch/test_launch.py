"""What `commopt launch` is going to start, and how it ends; nothing is trained here."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from accelerate_commopt import launch
from commopt import CommOptConfig, ConfigError
from commopt.cli import main
from commopt.config import VARIABLE

SLEEPER = "print(flush=True); import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a script, no configuration of the machine's own, and handlers of signals as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "default_config_file", str(tmp_path / "default_config.yaml"))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in (VARIABLE, "ACCELERATE_USE_CPU", *launch.MPI):
        os.environ.pop(name, None)
    Path("train.py").write_text("")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def prepared(text: str, *arguments: str) -> launch.Launch:
    Path("launch.yaml").write_text(text)
    return launch.prepare(["--config_file", "launch.yaml", *arguments])


def test_the_section_goes_into_the_environment_and_the_script_to_the_runner() -> None:
    found = prepared(
        "{distributed_type: MULTI_GPU, num_processes: 4, commopt: {compressor: int8}}", "train.py", "--lr", "1"
    )
    assert found.values == {"distributed_type": "MULTI_GPU", "num_processes": 4}
    assert found.environment == CommOptConfig("int8").to_environment()
    assert (found.options.module, found.options.training_script) == (True, "accelerate_commopt")
    assert found.options.training_script_args == ["train.py", "--lr", "1"]
    assert not found.notes


def test_a_module_goes_to_the_runner_too() -> None:
    found = launch.prepare(["--num_processes", "1", "-m", "json.tool", "--indent", "1"])
    assert found.options.training_script_args == ["-m", "json.tool", "--indent", "1"]
    assert (found.values, found.environment) == ({}, {})


def test_the_configuration_of_the_machine_is_used_as_accelerate_would(here: Path) -> None:
    (here / "default_config.yaml").write_text("{distributed_type: MULTI_GPU, num_processes: 4}")
    assert launch.prepare(["train.py"]).values["num_processes"] == 4
    assert launch.prepare(["--cpu", "train.py"]).values == {}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("{distributed_type: MULTI_CPU, num_processes: 2, gpu_ids: '0'}", []),
        ("{distributed_type: 'NO', use_cpu: true, num_processes: 2}", []),
        ("{distributed_type: MULTI_GPU, num_processes: 2}", ["--cpu"]),
        ("{distributed_type: 'NO'}", ["--cpu", "--num_processes", "2"]),
        ("", ["--cpu", "--num_processes", "2"]),
    ],
)
def test_several_processes_on_cpus_are_several(text: str, arguments: list[str]) -> None:
    found = prepared(text, *arguments, "train.py") if text else launch.prepare([*arguments, "train.py"])
    assert found.environment == {"ACCELERATE_USE_CPU": "true"}
    assert (found.values["distributed_type"], found.values["use_cpu"]) == ("MULTI_GPU", True)
    assert "gpu_ids" not in found.values
    assert not found.options.cpu
    assert found.options.main_process_port == 0
    assert found.notes[0].startswith("2 processes on CPUs are started by torchrun; accelerate launch itself starts one")


@pytest.mark.parametrize("arguments", [[], ["--machine_rank", "1", "--main_process_port", "8"]])
def test_and_on_several_machines(arguments: list[str]) -> None:
    text = "{distributed_type: MULTI_CPU, num_processes: 4, num_machines: 2, main_process_ip: host0}"
    found = prepared(text, *arguments, "train.py")
    assert found.values["main_process_ip"] == "host0"
    assert found.options.main_process_port == (8 if arguments else None)
    assert found.notes[0].startswith("4 processes on CPUs (2 of them here) are started by torchrun")


@pytest.mark.parametrize(
    ("text", "arguments", "variable"),
    [
        ("{distributed_type: MULTI_CPU, num_processes: 1}", [], None),
        ("{distributed_type: MULTI_GPU, num_processes: 2}", [], None),
        ("{distributed_type: FSDP, use_cpu: true, num_processes: 2}", [], None),
        ("{distributed_type: MULTI_CPU, num_processes: 2, mpirun_config: {mpirun_hostfile: hosts}}", [], None),
        ("{distributed_type: MULTI_CPU, num_processes: 2}", ["--mpirun_hostfile", "hosts"], None),
        ("{distributed_type: MULTI_CPU, num_processes: 2}", [], "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_all_else_is_left_to_accelerate(text: str, arguments: list[str], variable: str | None) -> None:
    if variable is not None:
        os.environ[variable] = "2"
    found = prepared(text, *arguments, "train.py")
    assert f"distributed_type: {found.values['distributed_type']}" in text
    assert (found.environment, found.notes, found.options.main_process_port) == ({}, [], None)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("distributed_type: MULTI_CPU", ["train.py"], "num_processes has to be given"),
        ("{distributed_type: MULTI_CPU, num_processes: 0}", ["train.py"], "num_processes has to be given"),
        ("{distributed_type: 'NO', num_machines: 0}", ["train.py"], "num_machines is 1 or more"),
        ("{distributed_type: MULTI_CPU, num_processes: 2, num_machines: 2}", ["train.py"], "main_process_ip."),
        (
            "{distributed_type: MULTI_CPU, num_processes: 3, num_machines: 2, main_process_ip: a}",
            ["train.py"],
            "has to be a multiple of their number; got 3 for 2 machines.",
        ),
        (
            "{distributed_type: MULTI_CPU, num_processes: 2, num_machines: 2, main_process_ip: a}",
            ["--machine_rank", "2", "train.py"],
            "machine_rank of 2 machines is 0 to 1, got 2.",
        ),
        (
            "{distributed_type: 'NO', num_procesess: 2}",
            ["train.py"],
            "launch.yaml: unknown key 'num_procesess'; did you",
        ),
        ("distributed_type: 'NO'", ["missing.py"], "there is no script 'missing.py', seen from"),
        ("distributed_type: 'NO'", ["-m", "missing"], "there is no module 'missing' to run"),
        ("distributed_type: 'NO'", ["--no_python", "train.py"], "--no_python: commopt runs inside of Python"),
        ("{distributed_type: 'NO', use_cpu: true}", ["--cpu", "--multi_gpu", "train.py"], "You can only use one of"),
    ],
)
def test_a_mistake_is_named(text: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("launch.yaml").write_text(text)
    assert launch.main(["--config_file", "launch.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--config_file", "missing.yaml", "train.py"]) == 2
    assert "missing.yaml: cannot be read: No such file" in capsys.readouterr().err


def started(monkeypatch: pytest.MonkeyPatch, job: Callable[[argparse.Namespace], None]) -> int:
    monkeypatch.setattr(launch, "launch_command", job)
    Path("launch.yaml").write_text("{distributed_type: 'NO', commopt: {compressor: int8}}")
    return launch.main(["--config_file", "launch.yaml", "train.py"])


def test_accelerate_gets_its_part_and_the_processes_get_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(options: argparse.Namespace) -> None:
        assert json.loads(Path(options.config_file).read_text()) == {"distributed_type": "NO"}
        assert CommOptConfig.from_environment() == CommOptConfig("int8")
        files.append(Path(options.config_file))

    files: list[Path] = []
    assert started(monkeypatch, job) == 0
    assert not files[0].exists()


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (subprocess.CalledProcessError(7, "train.py"), 7),
        (subprocess.CalledProcessError(-9, "train.py"), 137),
        (SignalException("ended", signal.SIGTERM), 143),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_status_is_passed_on(monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int) -> None:
    def job(_: argparse.Namespace) -> None:
        raise raised

    monkeypatch.setattr(launch, "GRACE", 0.0)
    assert started(monkeypatch, job) == status


def test_a_signal_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(_: argparse.Namespace) -> None:
        child = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout as output:
            output.readline()  # it has begun
            children.append(child)
            os.kill(os.getpid(), signal.SIGTERM)
            child.wait()

    children: list[subprocess.Popen[bytes]] = []
    with pytest.raises(SystemExit) as caught:
        started(monkeypatch, job)
    assert caught.value.code == 143
    assert not psutil.pid_exists(children[0].pid)
    children[0].wait()  # which psutil has done for it


def test_the_command_becomes_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    arguments = ["--config_file", "launch.yaml", "--help", "train.py", "-m", "--", "--lr", "1"]
    assert main(["launch", *arguments]) == 0
    assert commands == [[sys.executable, "-m", "accelerate_commopt.launch", *arguments]]


def test_without_accelerate_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["launch", "train.py"]) == 2
    assert "commopt launch needs Accelerate: pip install 'commopt[accelerate]'" in capsys.readouterr().err


def test_options_that_do_not_go_together_are_errors_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(_: argparse.Namespace) -> None:
        raise ValueError("pass num_processes")

    monkeypatch.setattr(launch, "launch_command", job)
    with pytest.raises(ConfigError, match="accelerate launch: pass num_processes"):
        launch.start(launch.prepare(["train.py"]))
