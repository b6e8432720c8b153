"""The file of a launch: every key is known, or the nearest one is named."""

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file  # type: ignore[import-untyped]

from accelerate_commopt.file import LaunchFile
from commopt import CommOptConfig, ConfigError

RECIPES = Path(__file__).parents[2] / "recipes" / "gpt"
WHOLE = {"distributed_type": "MULTI_CPU", "num_processes": 2}


def test_a_file_has_two_parts(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("distributed_type: 'NO'\nmixed_precision: bf16\ncommopt:\n  compressor: topk\n  timeout: 60\n")
    found = LaunchFile.read(file)
    assert found.accelerate == {"distributed_type": "NO", "mixed_precision": "bf16"}
    assert found.config == CommOptConfig("topk", timeout=60)
    file.write_text("distributed_type: MULTI_GPU\n")
    assert LaunchFile.read(file) == LaunchFile({"distributed_type": "MULTI_GPU"}, None)


@pytest.mark.parametrize(
    "values",
    [
        {"fsdp_config": {"fsdp_version": 2, "offload_params": True}},  # with its prefix, or without
        {"deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0}},
        {"dynamo_config": {"dynamo_backend": "INDUCTOR", "mode": "default"}},
        {"megatron_lm_config": {"megatron_lm_tp_degree": 2}},
        {"parallelism_config": {"parallelism_config_tp_size": 2}},
        {"mpirun_config": {"mpirun_hostfile": "hosts"}},
        {"fp8_config": {"backend": "TE", "fp8_margin": 0}},
        {"mpirun_config": {}, "fsdp_config": None, "main_process_ip": None},
        {"downcast_bf16": "no", "same_network": True, "rdzv_backend": "c10d"},
        {"fp16": True, "dynamo_backend": "NO"},  # of older releases
    ],
)
def test_what_accelerate_knows_is_taken(values: dict[str, Any]) -> None:
    assert LaunchFile.from_dict(WHOLE | values).accelerate == WHOLE | values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_procesess": 2}, "unknown key 'num_procesess'; did you mean 'num_processes'?"),
        ({"comopt": {}}, "unknown key 'comopt'; did you mean 'commopt'?"),
        (
            {"commopt": {"compresor": "int8"}},
            "commopt: unknown configuration key 'compresor'; did you mean 'compressor'",
        ),
        ({"commopt": {"compressor": "int9"}}, "commopt: unknown compressor 'int9'; did you mean 'int"),
        ({"commopt": {"compressor": "topk", "options": {"densty": 0.1}}}, "did you mean 'density'?"),
        ({"commopt": {"version": 2}}, "commopt: version 2 of the configuration is not known here"),
        ({"commopt": {"timeout": "long"}}, "commopt: timeout must be a positive number"),
        ({"commopt": None}, "commopt: expected lines such as 'compressor: auto' below it, got None."),
        ({"commopt": "int8"}, "commopt: expected lines such as 'compressor: auto' below it, got 'int8'."),
        (
            {"fsdp_config": {"fsdp_ofload_params": True}},
            "in fsdp_config 'fsdp_ofload_params'; did you mean 'fsdp_offload_",
        ),
        (
            {"fsdp_config": {"ofload_params": True}},
            "unknown key in fsdp_config 'ofload_params'; did you mean 'fsdp_offl",
        ),
        (
            {"deepspeed_config": {"zerostage": 2}},
            "unknown key in deepspeed_config 'zerostage'; did you mean 'zero_stage'?",
        ),
        ({"deepspeed_config": {"fsdp_version": 2}}, "unknown key in deepspeed_config 'fsdp_version'"),
        ({"dynamo_config": {"num_processes": 2}}, "unknown key in dynamo_config 'num_processes'"),
        ({"megatron_lm_config": {"tp_degree": 2}}, "did you mean 'megatron_lm_tp_degree'?"),
        ({"parallelism_config": {"tp_size": 2}}, "did you mean 'parallelism_config_tp_size'?"),
        ({"mpirun_config": {"mpirun_hostfiles": "x"}}, "did you mean 'mpirun_hostfile'?"),
        ({"num_processes": "2"}, "num_processes: expected a whole number, got '2'."),
        ({"num_processes": True}, "num_processes: expected a whole number, got True."),
        ({"num_processes": None}, "num_processes: expected a whole number, got None."),
        ({"main_process_port": "29500"}, "main_process_port: expected a whole number, got '29500'."),
        ({"main_process_ip": 8}, "main_process_ip: expected text, got 8."),
        ({"gpu_ids": 0}, "gpu_ids: expected text, got 0."),
        ({"use_cpu": 1}, "use_cpu: expected true or false, got 1."),
        ({"fsdp_config": "full"}, "fsdp_config: expected keys and values below it, got 'full'."),
        ({"tpu_env": "A=1"}, "tpu_env: expected a list, got 'A=1'."),
        ({"distributed_type": "MULTI_GPUS"}, "distributed_type: expected one of NO, MULTI_CPU, MULTI_GPU"),
        ({"distributed_type": None}, "distributed_type: expected one of NO, MULTI_CPU"),
        ({"distributed_type": False}, "got False (without quotes, no and off are false in YAML: write 'no')."),
        ({"mixed_precision": "fp32"}, "mixed_precision: expected one of no, fp16, bf16, fp8, got 'fp32'."),
        ({"mixed_precision": False}, "got False (without quotes, no and off are false in YAML: write 'no')."),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment: commopt launch starts processes on this"),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LaunchFile.from_dict(WHOLE | values)
    assert message in str(caught.value)


def test_a_mistake_is_named_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("num_processes: 2\n")
    with pytest.raises(ConfigError) as caught:
        LaunchFile.read(file)
    assert str(caught.value).startswith(f"{file}: distributed_type: expected one of NO, ")
    assert str(caught.value).endswith("got nothing.")


def test_the_files_of_the_recipe() -> None:
    assert load_config_from_file(str(RECIPES / "accelerate.yaml")).num_processes == 2
    both = LaunchFile.read(RECIPES / "launch.yaml")
    assert both.config == CommOptConfig.from_yaml(RECIPES / "commopt.yaml") == CommOptConfig()
    assert both.accelerate["num_processes"] == 2
