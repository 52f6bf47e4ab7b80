"""Files in which accelerate and DeepSpeed are told how to train, read as settings of `rft-train`.

Both forms are read: accelerate's YAML, whose part `deepspeed_config` holds the ZeRO settings, and DeepSpeed's own JSON,
which is YAML too. A key has an effect here, or needs none, or is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names

_LARGEST = 1_000_000
_NO_NEED = {
    "compute_environment": "ranks are started by --nproc, torchrun or SLURM",
    "machine_rank": "it is NODE_RANK of the environment",
    "main_process_ip": "it is MASTER_ADDR of the environment",
    "main_process_port": "it is MASTER_PORT of the environment",
    "main_training_function": "the command is the program",
    "rdzv_backend": "torchrun has it",
    "same_network": "torchrun has it",
    "use_cpu": "it is --device",
    "debug": "it is --debug",
    "deepspeed_multinode_launcher": "torchrun or SLURM starts the ranks",
    "contiguous_gradients": "gradients are contiguous",
    "reduce_scatter": "gradients are reduced by scatter",
    "reduce_bucket_size": "the size of messages follows from the model",
    "allgather_bucket_size": "the size of messages follows from the model",
    "allgather_partitions": "the size of messages follows from the model",
    "round_robin_gradients": "the size of messages follows from the model",
    "zero3_init_flag": "it is --meta_init, chosen by the strategy",
    "zero3_save_16bit_model": "a checkpoint holds a Hugging Face directory in any case",
    "stage3_gather_16bit_weights_on_model_save": "a checkpoint holds a Hugging Face directory in any case",
    "stage3_prefetch_bucket_size": "the size of messages follows from the model",
    "stage3_param_persistence_threshold": "the size of messages follows from the model",
    "stage3_max_live_parameters": "the size of messages follows from the model",
    "stage3_max_reuse_distance": "the size of messages follows from the model",
    "sub_group_size": "the size of messages follows from the model",
    "steps_per_print": "it is --log_interval",
    "wall_clock_breakdown": "the times of a step are among the metrics",
}
"""Keys without a setting, and why none is needed."""
_PARTS = ("deepspeed_config", "zero_optimization")
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_NONE = ("none", "null", "auto", "")


@dataclass(frozen=True, slots=True)
class DeepSpeedSettings:
    """The settings that a file asks for."""

    settings: Mapping[str, str]
    """Settings of `rft-train` by their names, as text."""
    accumulation: int | None
    """Micro-batches of a rank in a step; None where the file does not say."""
    notes: tuple[str, ...]


def read_deepspeed(path: Path) -> DeepSpeedSettings:
    """Read a file of accelerate (`config/zero2_opt.yaml`) or of DeepSpeed.

    Raises:
        OptionsError: it cannot be read, or a key has no meaning here, or would have no effect; with its line.
    """
    entries = dict(_entries(path, _parsed(path)))
    settings: dict[str, str] = {}
    notes: list[str] = []
    accumulation = None
    for key, entry in entries.items():
        if key in _NO_NEED:
            notes.append(f"{key} = {entry.text} ({path.name}:{entry.line}) has no effect: {_NO_NEED[key]}")
        elif key == "gradient_accumulation_steps":
            accumulation = entry.number() if entry.text.lower() not in _NONE else None
        elif key in _MEANINGS:
            settings |= dict(_MEANINGS[key](entry))
        else:
            why, do = _unknown(key)
            raise entry.refused("it has no meaning here", why, do)
    _refuse_idle_offloads(entries, settings)
    return DeepSpeedSettings(settings, accumulation, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A key of the file and its value as text."""

    path: Path
    line: int
    key: str
    text: str

    def refused(self, what: str, why: str, do: str) -> OptionsError:
        """Return the error of this line: what is wrong with the value, and why it is so."""
        return OptionsError(
            code="deepspeed.key",
            what=f"{self.key} = {self.text} cannot be used: {what}",
            where=f"{self.path}:{self.line}",
            why=why,
            do=do,
        )

    def flag(self) -> bool:
        """Return the value as a boolean."""
        if self.text.lower() not in (*_TRUE, *_FALSE):
            raise self.refused("it is true or false", "the key switches something on or off", f"{self.key}: true")
        return self.text.lower() in _TRUE

    def number(self) -> int:
        """Return the value as a whole number above 0."""
        try:
            value = float(self.text)
        except ValueError:
            value = 0.0
        if value < 1 or not value.is_integer():
            raise self.refused("it is a whole number above 0", "the key counts something", f"{self.key}: 1")
        return int(value)


_FLAGS = {
    "optimizer": "the flags of the learning rate, --adam_betas and --l2",
    "scheduler": "--lr_schedule and --lr_warmup_ratio",
}
"""Parts of a file of DeepSpeed whose settings are flags here."""


def _unknown(key: str) -> tuple[str, str]:
    """Return why a key has no meaning here, and the remedy: the key that was meant, the flags, or to leave it out."""
    near = nearest_names(key, [*_MEANINGS, *_NO_NEED], count=1, cutoff=0.85)
    if near:
        return f"no key is called so; the nearest is {near[0]}", near[0]
    part = key.partition(".")[0]
    if part in _FLAGS:
        return f"the {part} of a run is made from {_FLAGS[part]}", f"leave {part} out"
    if part == "fp16":
        return "the scale of losses in float16 follows from --fp16 alone", "leave it out"
    return "nothing here is set by it, and a key that is ignored would be believed", "leave it out"


def _parsed(path: Path) -> yaml.Node:
    compose = cast("Any", yaml).compose  # its stub has no types
    try:
        text = path.read_text(encoding="utf-8")
        node = compose(text, Loader=yaml.SafeLoader) if len(text) <= _LARGEST else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise _unreadable(path, f"cannot be read: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise _unreadable(path, "holds no keys, or too many")
    return node


def _unreadable(path: Path, what: str) -> OptionsError:
    return OptionsError(
        code="deepspeed.file",
        what=f"{path} {what}",
        where="--deepspeed_config",
        why="it is a file of accelerate or DeepSpeed, such as config/zero2_opt.yaml",
        do="--zero_stage 2",
    )


def _entries(path: Path, root: yaml.Node) -> Iterator[tuple[str, _Entry]]:
    """Yield every key of the file; those of inner parts under a name that says which part they are of."""
    for key, value in root.value:
        name = str(key.value)
        if name in _PARTS and isinstance(value, yaml.MappingNode):
            yield from _entries(path, value)
        elif isinstance(value, yaml.MappingNode):
            for inner, inner_value in value.value:
                entry = _Entry(path, inner.start_mark.line + 1, f"{name}.{inner.value}", str(inner_value.value))
                yield entry.key, entry
        else:
            yield name, _Entry(path, key.start_mark.line + 1, name, str(value.value))


def _distributed_type(entry: _Entry) -> dict[str, str]:
    if entry.text.upper() not in ("DEEPSPEED", "NO", "MULTI_GPU"):
        why = "the file is read for ZeRO; other ways of dividing a model have flags of their own"
        raise entry.refused("it is DEEPSPEED, MULTI_GPU or NO", why, "--fsdp, without the file")
    return {}


def _machines(entry: _Entry) -> dict[str, str]:
    if entry.number() > 1:
        why = "a file cannot start processes on other machines: torchrun or srun does"
        do = f"torchrun --nnodes {entry.number()} ... -m rft_cli.main, with {entry.key}: 1"
        raise entry.refused("the machines are named to the launcher", why, do)
    return {}


def _processes(entry: _Entry) -> dict[str, str]:
    return {"nproc": str(entry.number())} if entry.number() > 1 else {}


def _precision(entry: _Entry) -> dict[str, str]:
    kinds = {"bf16": {"bf16": "true"}, "fp16": {"fp16": "true"}, "no": {}, "none": {}}
    if entry.text.lower() not in kinds:
        raise entry.refused(
            "it is bf16, fp16 or no",
            "these are the types of --bf16 and --fp16; there is no other",
            f"{entry.key}: bf16",
        )
    return kinds[entry.text.lower()]


def _stage(entry: _Entry) -> dict[str, str]:
    if entry.text not in ("0", "1", "2", "3"):
        raise entry.refused("it is 0, 1, 2 or 3", "ZeRO has these stages; the flag is --zero_stage", f"{entry.key}: 2")
    return {"zero_stage": entry.text}


def _overlap(entry: _Entry) -> dict[str, str]:
    return {"overlap_comm": "true"} if entry.flag() else {}


def _clipping(entry: _Entry) -> dict[str, str]:
    return {} if entry.text.lower() in _NONE else {"max_norm": entry.text}


def _offload_optimizer(entry: _Entry) -> dict[str, str]:
    return {"adam_offload": "true"} if _device(entry) == "cpu" else {}


def _offload_parameters(entry: _Entry) -> dict[str, str]:
    if _device(entry) == "cpu":
        why = (
            "only FSDP moves weights to the CPU (--fsdp_cpu_offload); ZeRO moves the optimizer's state (--adam_offload)"
        )
        raise entry.refused("weights of ZeRO stay on the GPU", why, "--fsdp --fsdp_cpu_offload, without the file")
    return {}


def _device(entry: _Entry) -> str:
    device = entry.text.lower()
    if device not in ("cpu", *_NONE):
        is_state = entry.key.startswith("offload_optimizer")
        flag, device = ("--adam_offload", "cpu") if is_state else ("--fsdp_cpu_offload", "none")
        why = f"{flag} knows no other place, such as a disk"
        raise entry.refused("states go to the CPU or stay on the GPU", why, f"{entry.key}: {device}")
    return device


def _enabled(entry: _Entry) -> dict[str, str]:
    is_on = entry.text.lower() not in _NONE and entry.flag()
    return {entry.key.partition(".")[0]: "true"} if is_on else {}


def _micro_batch(entry: _Entry) -> dict[str, str]:
    return {} if entry.text.lower() in _NONE else {"micro_train_batch_size": str(entry.number())}


def _batch(entry: _Entry) -> dict[str, str]:
    return {} if entry.text.lower() in _NONE else {"train_batch_size": str(entry.number())}


def _nothing(entry: _Entry) -> dict[str, str]:
    return {}


_MEANINGS = {
    "distributed_type": _distributed_type,
    "num_machines": _machines,
    "num_processes": _processes,
    "mixed_precision": _precision,
    "zero_stage": _stage,
    "stage": _stage,
    "overlap_comm": _overlap,
    "gradient_clipping": _clipping,
    "offload_optimizer_device": _offload_optimizer,
    "offload_optimizer.device": _offload_optimizer,
    "offload_param_device": _offload_parameters,
    "offload_param.device": _offload_parameters,
    "offload_optimizer.pin_memory": _nothing,
    "offload_param.pin_memory": _nothing,
    "bf16.enabled": _enabled,
    "fp16.enabled": _enabled,
    "train_micro_batch_size_per_gpu": _micro_batch,
    "train_batch_size": _batch,
}
"""Keys, and the settings that each stands for."""


def _refuse_idle_offloads(entries: Mapping[str, _Entry], settings: Mapping[str, str]) -> None:
    """Refuse to keep the optimizer's state on the CPU without the stages of ZeRO that divide it."""
    for key in ("offload_optimizer_device", "offload_optimizer.device"):
        if key in entries and "adam_offload" in settings and int(settings.get("zero_stage", "0")) < 1:
            why = "--adam_offload moves the state that a stage of ZeRO from 1 on divides among the ranks"
            raise entries[key].refused("without a stage of ZeRO it would have no effect", why, "zero_stage: 2")
