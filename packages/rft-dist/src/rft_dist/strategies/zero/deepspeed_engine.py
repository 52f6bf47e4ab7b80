"""DeepSpeed integration: import, configuration, and options refused before a model is touched."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError, PreflightError, install_command
from rft_dist.launch.single_process import init_single_process_group

_BUCKET_NUMEL = 2**24
"""Elements that are exchanged at a time: 64 MiB of float32, twice when exchanges overlap the backward pass."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOptions:
    """DeepSpeed options of a run; `ZeroModel` documents each."""

    stage: int
    max_norm: float
    cpu_offload: bool = False
    hpz_size: int = 1
    overlap_comm: bool = False
    persistent_numel: int = 100_000
    initial_scale_power: int = 16


def load_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed, set to the device this process computes on, with its log silent below errors.

    Raises:
        PreflightError: it is not installed, or too old.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise PreflightError(
            code="zero.not_installed",
            what="the package deepspeed is not installed",
            where="--zero_stage",
            why="DeepSpeed implements ZeRO 1 to 3",
            do=install_command("deepspeed"),
        )
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed's calls
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not hasattr(deepspeed.DeepSpeedEngine, "managed_gradient_accumulation"):
        raise PreflightError(
            code="zero.too_old",
            what=f"deepspeed {deepspeed.__version__}, at least 0.19.8 is needed",
            where="--zero_stage",
            why="older versions end a step at every micro-batch",
            do=f"{install_command('deepspeed')} --upgrade-package deepspeed",
        )
    # Or else, on a CPU, it runs a C++ compiler at start for an all-reduce that only its inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def start_engine(
    deepspeed: Any, root: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], device: torch.device
) -> Any:
    """Create DeepSpeed's engine; its output to stdout meanwhile is dropped."""
    init_single_process_group(device)
    with contextlib.redirect_stdout(io.StringIO()), local_rank(device):
        engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


@contextlib.contextmanager
def local_rank(device: torch.device) -> Generator[None]:
    """Set LOCAL_RANK while the block runs: DeepSpeed reads it even with a device given; no child should inherit it."""
    missing = "LOCAL_RANK" not in os.environ
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    try:
        yield
    finally:
        if missing:
            os.environ.pop("LOCAL_RANK", None)


def verify_options(
    trained: Iterable[Tensor], options: ZeroOptions, world_size: int, frozen: Iterable[Tensor] = ()
) -> torch.dtype:
    """Return the dtype of the trained weights; frozen ones may have another where the trained are float32 (adapters).

    Raises:
        OptionsError: what DeepSpeed cannot do, or would do without an effect; `do` names the nearest that works.
    """
    stage = options.stage
    assert stage in (1, 2, 3), f"ZeRO has the stages 1, 2 and 3, not {stage}"
    dtypes, others = _dtypes(trained), _dtypes(frozen)
    if dtypes != [torch.float32]:  # DeepSpeed casts the whole model to the narrow type that it steps for
        dtypes = sorted({*dtypes, *others}, key=str)
    if len(dtypes) != 1 or dtypes[0] not in _DTYPES:
        raise OptionsError(
            code="zero.dtype",
            what=f"weights of {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}",
            where=f"--zero_stage {stage}",
            why="DeepSpeed keeps all weights in one dtype: float32, bfloat16 or float16; only where trained ones are "
            "float32 may frozen ones have another",
            do="--fsdp",
        )
    _verify_hpz(options.hpz_size, world_size)
    return dtypes[0]


def _dtypes(parameters: Iterable[Tensor]) -> list[torch.dtype]:
    return sorted({parameter.dtype for parameter in parameters if parameter.is_floating_point()}, key=str)


def _verify_hpz(hpz_size: int, world_size: int) -> None:
    if world_size % hpz_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise OptionsError(
            code="zero.zpg_size",
            what=f"zpg = {hpz_size}, {world_size} {'rank' if world_size == 1 else 'ranks'}",
            where="--zpg",
            why=f"the second copy is sharded over equal groups of ranks; allowed: {', '.join(map(str, divisors))}",
            do=f"--zpg {min(divisors, key=lambda size: abs(size - hpz_size))}",
        )


def verify_float16(deepspeed: Any) -> None:
    """Raise OptionsError where the device does not compute in float16."""
    if not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        raise OptionsError(
            code="zero.float16",
            what="float16 weights on a device that does not compute in float16",
            where="--fp16",
            why="DeepSpeed trains in float16 only where the device supports it",
            do="--bf16",
        )


def engine_config(dtype: torch.dtype, options: ZeroOptions, device: torch.device, numel: int) -> dict[str, Any]:
    """Return the config of `deepspeed.initialize`: gradients are summed and exchanged in float32 for any weights.

    `numel` is the number of trained weights: no more is exchanged at a time.
    """
    bucket = min(_BUCKET_NUMEL, 1024 * -(-numel // 1024))  # DeepSpeed wants an even number
    zero: dict[str, Any] = {
        "stage": options.stage,
        "overlap_comm": options.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if options.stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": options.persistent_numel,
            "zero_hpz_partition_size": options.hpz_size,
            "memory_efficient_linear": False,  # it would replace torch's linear for the whole process
        }
    if options.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # of no meaning here: losses carry their denominators
        "gradient_accumulation_steps": 1,
        # A step ends where `step` is called. Ended by a mark on the last backward pass (0.19.8), it loses gradients
        # of parameters that only the passes before used: at stages 2 and 3 with offload, at stage 1 with overlap.
        "managed_gradient_accumulation": False,
        "gradient_clipping": options.max_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},
        "fp16": {
            "enabled": dtype == torch.float16,
            "loss_scale": 0,  # one that adapts
            "initial_scale_power": options.initial_scale_power,
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW steps on the host as well, and needs no compiler
        "steps_per_print": None,
    }
