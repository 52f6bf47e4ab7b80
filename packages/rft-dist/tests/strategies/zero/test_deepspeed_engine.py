"""What DeepSpeed is told and asked, with a double in its place."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft_core.errors import OptionsError, PreflightError
from rft_dist.strategies.zero import deepspeed_engine as engine
from rft_dist.strategies.zero.deepspeed_engine import ZeroOptions, engine_config, local_rank, verify_options

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 3)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In the place of the package; its engine can be told where a step ends."""
    double = SimpleNamespace(
        DeepSpeedEngine=SimpleNamespace(managed_gradient_accumulation=True),
        ops=SimpleNamespace(__compatible_ops__={"deepspeed_shm_comm": True}),
        __version__="0.19.8",
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: {"deepspeed": double}[name])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return double


def test_the_package_is_told_its_device_and_compiles_nothing(package: Any) -> None:
    assert engine.load_deepspeed(CUDA) is package
    assert "DS_ACCELERATOR" not in os.environ
    assert engine.load_deepspeed(CPU) is package
    assert os.environ.pop("DS_ACCELERATOR") == "cpu"
    assert package.ops.__compatible_ops__ == {"deepspeed_shm_comm": False}
    assert logging.getLogger("DeepSpeed").level == logging.ERROR


def test_a_package_that_cannot_be_told_where_a_step_ends_is_refused(package: Any) -> None:
    package.DeepSpeedEngine = SimpleNamespace()
    with pytest.raises(PreflightError) as caught:
        engine.load_deepspeed(CUDA)
    assert caught.value.problem.code == "zero.too_old"


def test_a_package_that_is_not_there_is_refused_before_anything_is_set(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError) as caught:
        engine.load_deepspeed(CPU)
    assert caught.value.problem.code == "zero.not_installed"
    assert "DS_ACCELERATOR" not in os.environ


@pytest.mark.usefixtures("package")
def test_a_device_that_the_environment_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    engine.load_deepspeed(CPU)
    assert os.environ["DS_ACCELERATOR"] == "xpu"


@pytest.mark.usefixtures("package")
def test_the_package_s_calls_of_old_names_of_torch_are_not_warned_of_and_others_are() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.load_deepspeed(CUDA)
        warnings.warn("`torch.distributed.reduce_op` is deprecated", FutureWarning, stacklevel=1)
        with pytest.raises(FutureWarning):
            warnings.warn("`torch.jit.script` is deprecated", FutureWarning, stacklevel=1)


def test_the_local_rank_is_taken_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(OSError, match="refused"), local_rank(CUDA):  # noqa: PT012 - the body is what fails
        assert os.environ["LOCAL_RANK"] == "3"
        raise OSError("refused")
    assert "LOCAL_RANK" not in os.environ


def test_the_local_rank_is_set_while_it_is_missing_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for device, number in ((CUDA, "3"), (CPU, "0")):
        with local_rank(device):
            assert os.environ["LOCAL_RANK"] == number
        assert "LOCAL_RANK" not in os.environ
    monkeypatch.setenv("LOCAL_RANK", "5")
    with local_rank(CUDA):
        assert os.environ["LOCAL_RANK"] == "5"
    assert os.environ["LOCAL_RANK"] == "5"


def test_an_engine_is_made_silently_on_a_group_that_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    groups: list[Any] = []
    monkeypatch.setattr(engine, "init_single_process_group", groups.append)
    asked: dict[str, Any] = {}

    def initialize(**options: Any) -> tuple[str, int, int]:
        print("loud")
        asked.update(options, local=os.environ["LOCAL_RANK"])
        return "engine", 1, 2

    root, optimizer, config = torch.nn.Linear(1, 1), object(), {"a": 1}
    package = SimpleNamespace(initialize=initialize)
    assert engine.start_engine(package, root, optimizer, config, CUDA) == "engine"  # type: ignore[arg-type]
    assert groups == [CUDA]
    assert capsys.readouterr().out == ""
    expected = {"model": root, "optimizer": optimizer, "config": config, "dist_init_required": False, "local": "3"}
    assert asked == expected


def options(**changes: Any) -> ZeroOptions:
    return ZeroOptions(**({"stage": 3, "max_norm": 0.5} | changes))


def test_the_type_of_what_is_trained_decides() -> None:
    narrow, full = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    assert verify_options([full], options(), 1, [narrow, torch.zeros(1, dtype=torch.int64)]) == torch.float32
    assert verify_options([narrow, torch.zeros(1, dtype=torch.int8)], options(), 1, [narrow]) == torch.bfloat16
    assert verify_options([torch.zeros(1, dtype=torch.float16)], options(), 1) == torch.float16
    for trained, frozen in (([narrow], [full]), ([narrow, full], []), ([torch.zeros(1, dtype=torch.float64)], [])):
        with pytest.raises(OptionsError) as caught:
            verify_options(trained, options(), 1, frozen)
        assert caught.value.problem.code == "zero.dtype"
    for stage in (0, 4):
        with pytest.raises(AssertionError):
            verify_options([full], options(stage=stage), 1)


@pytest.mark.parametrize(
    ("changes", "ranks", "code", "do"),
    [
        ({"hpz_size": 2}, 4, None, ""),
        ({"hpz_size": 1, "stage": 2}, 3, None, ""),
        ({"hpz_size": 4}, 6, "zero.zpg_size", "--zpg 3"),
        ({"hpz_size": 5}, 6, "zero.zpg_size", "--zpg 6"),
        ({"hpz_size": 2}, 7, "zero.zpg_size", "--zpg 1"),
        ({"overlap_comm": True}, 4, None, ""),
        ({"overlap_comm": True, "stage": 2}, 4, None, ""),
        ({"stage": 1}, 4, None, ""),
    ],
)
def test_combinations_that_deepspeed_cannot_do(changes: dict[str, Any], ranks: int, code: str | None, do: str) -> None:
    if code is None:
        verify_options([torch.zeros(1)], options(**changes), ranks)
        return
    with pytest.raises(OptionsError) as caught:
        verify_options([torch.zeros(1)], options(**changes), ranks)
    assert (caught.value.problem.code, caught.value.problem.do) == (code, do)


@pytest.mark.parametrize("supported", [True, False])
def test_a_device_without_float16_is_refused(supported: bool) -> None:
    accelerator = SimpleNamespace(is_fp16_supported=lambda: supported)
    package = SimpleNamespace(accelerator=SimpleNamespace(get_accelerator=lambda: accelerator))
    if supported:
        engine.verify_float16(package)
        return
    with pytest.raises(OptionsError) as caught:
        engine.verify_float16(package)
    assert caught.value.problem.code == "zero.float16"


def test_gradients_are_summed_and_exchanged_in_float32_and_a_step_ends_where_it_is_called() -> None:
    config = engine_config(torch.bfloat16, options(), CPU, 10_000)
    assert config == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": 10_240,
            "allgather_bucket_size": 10_240,
            "stage3_param_persistence_threshold": 100_000,
            "zero_hpz_partition_size": 1,
            "memory_efficient_linear": False,
        },
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def test_options_reach_the_configuration() -> None:
    given = options(stage=2, cpu_offload=True, overlap_comm=True, initial_scale_power=8)
    config = engine_config(torch.float16, given, CUDA, 2**30)
    zero = config["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert zero["overlap_comm"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 2**24
    assert "zero_hpz_partition_size" not in zero
    assert config["fp16"] == {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}
    assert not config["bf16"]["enabled"]
    on_cpu = engine_config(torch.float32, options(cpu_offload=True, hpz_size=2, persistent_numel=7), CPU, 1)
    assert on_cpu["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert on_cpu["zero_optimization"]["zero_hpz_partition_size"] == 2
    assert on_cpu["zero_optimization"]["stage3_param_persistence_threshold"] == 7
    assert on_cpu["zero_optimization"]["reduce_bucket_size"] == 1024
