"""The one configuration: what it takes, and what it says to a mistake."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from commopt import CommOptConfig, ConfigError
from commopt.compressors import create
from commopt.config import VARIABLE, read_yaml
from commopt.plan import Plan


def test_defaults() -> None:
    assert CommOptConfig() == CommOptConfig("auto", options={}, error_feedback=None, timeout=1800.0, quality="safe")
    assert Plan.from_config(CommOptConfig()) == Plan.uncompressed()  # until something was measured
    assert Plan.from_config(CommOptConfig("int8")) == Plan(create("int8"), feedback=False)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CommOptConfig().compressor = "int4"  # type: ignore[misc]


def test_plain_data_is_enough() -> None:
    values = {"compressor": "topk", "options": {"density": 0.02}, "error_feedback": False, "timeout": 60}
    assert CommOptConfig.from_dict(values) == CommOptConfig("topk", {"density": 0.02}, False, 60)
    assert Plan.from_config(CommOptConfig.from_dict(values)) == Plan(create("topk", density=0.02), feedback=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"compresor": "int8"}, "unknown configuration key 'compresor'; did you mean 'compressor'?"),
        ({"feedback": True}, "unknown configuration key 'feedback'; did you mean 'error_feedback'?"),
        ({"xyz": 1}, "unknown configuration key 'xyz'"),
        ({"compressor": 8}, "compressor must be a registered name, got 8."),
        ({"options": "rank=4"}, "options must be a mapping of option names to values, got 'rank=4'."),
        ({"options": {4: "rank"}}, "options must be a mapping of option names to values, got {4: 'rank'}."),
        ({"error_feedback": "yes"}, "error_feedback must be true, false or null, got 'yes'."),
        ({"error_feedback": 1}, "error_feedback must be true, false or null, got 1."),
        ({"checked": 1}, "checked must be true or false, got 1."),
        ({"quality": "best"}, "quality must be one of lossless, safe, aggressive, got 'best'."),
        ({"options": {"rank": 4}}, "compressor='auto' chooses options and error feedback itself"),
        ({"error_feedback": True}, "compressor='auto' chooses options and error feedback itself"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, got 0."),
        ({"timeout": float("inf")}, "timeout must be a positive number of seconds, got inf."),
        ({"timeout": float("nan")}, "timeout must be a positive number of seconds, got nan."),
        ({"timeout": "60"}, "timeout must be a positive number of seconds, got '60'."),
        ({"timeout": True}, "timeout must be a positive number of seconds, got True."),
        ({"version": 2}, "version 2 of the configuration is not known here, only version 1"),
        ({"version": True}, "version True of the configuration is not known here"),
        ({"verison": 1}, "did you mean 'version'?"),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CommOptConfig.from_dict(values)
    assert message in str(caught.value)


def test_feedback_follows_the_compressor_unless_told() -> None:
    assert Plan.from_config(CommOptConfig("onebit")).feedback
    assert not Plan.from_config(CommOptConfig("onebit", error_feedback=False)).feedback
    assert not Plan.from_config(CommOptConfig("bf16")).feedback
    assert Plan.from_config(CommOptConfig("bf16", error_feedback=True)).feedback


def test_an_unbiased_compressor_shrinks_under_feedback() -> None:
    assert Plan(create("randomk", density=0.1), feedback=True).gain == pytest.approx(0.1)
    assert Plan(create("randomk", density=0.1), feedback=False).gain == 1.0
    assert Plan(create("topk"), feedback=True).gain == 1.0


def test_a_file_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "commopt.yaml"
    file.write_text("version: 1\ncompressor: powersgd\noptions: {rank: 2}\nerror_feedback: on\n")
    assert CommOptConfig.from_yaml(file) == CommOptConfig("powersgd", {"rank": 2}, error_feedback=True)
    file.write_text('{"compressor": "none", "timeout": 60}')
    assert CommOptConfig.from_yaml(str(file)) == CommOptConfig("none", timeout=60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"compresor: int8", "unknown configuration key 'compresor'; did you mean 'compressor'?"),
        (b"version: 2\ncompressor: int8", "version 2 of the configuration is not known here, only version 1"),
        (b"compressor: int8\ntimeout: soon", "timeout must be a positive number of seconds, got 'soon'."),
        (b"compressor: null", "compressor must be a registered name, got None."),
        (b"", "the file is empty; one line such as 'compressor: auto' is enough."),
        (b"# nothing but a comment", "the file is empty"),
        (b"- int8", "expected lines of the form 'key: value', got \"['int8']\"."),
        (b"int8", "expected lines of the form 'key: value', got 'int8'."),
        (b"8: int8", "expected lines of the form 'key: value'"),
        (b"compressor: [int8", "this is not valid YAML"),
        (b"compressor: !!python/name:os.system", "this is not valid YAML"),
        (b"compressor: \xff", "cannot be read: it is no text in UTF-8."),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "commopt.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        CommOptConfig.from_yaml(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.yaml: cannot be read: No such file"):
        CommOptConfig.from_yaml(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        CommOptConfig.from_yaml(tmp_path)


def test_without_pyyaml_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        read_yaml(tmp_path)


@pytest.mark.parametrize("config", [CommOptConfig(), CommOptConfig("topk", {"density": 0.02}, False, 60, True)])
def test_it_passes_through_the_environment(monkeypatch: pytest.MonkeyPatch, config: CommOptConfig) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert CommOptConfig.from_environment() is None
    for name, value in config.to_environment().items():
        monkeypatch.setenv(name, value)
    assert CommOptConfig.from_environment() == config


@pytest.mark.parametrize("text", ["{", "8", "[]", '{"compresor": "int8"}', '{"version": 2}', '{"timeout": 0}'])
def test_an_environment_that_another_has_set_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=rf"{VARIABLE} in the environment: .*unset it"):
        CommOptConfig.from_environment()


def test_options_that_cannot_travel_are_named() -> None:
    with pytest.raises(ConfigError, match="plain values"):
        CommOptConfig("topk", {"density": object()}).to_environment()
