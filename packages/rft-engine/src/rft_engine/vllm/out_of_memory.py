"""Diagnosis of a vLLM start that ran out of memory: who holds the memory, how much is needed, what to set.

The messages are those of vLLM 0.32 (`v1/worker/utils.py`, `v1/core/kv_cache_utils.py`,
`v1/worker/cpu_worker.py`, `v1/worker/gpu_model_runner.py`) and of torch's allocator.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

from rft_core.errors import ServiceError
from rft_engine.process.gpu_processes import (
    Device,
    DeviceProcess,
    Inventory,
    held_by,
    other_processes,
    visible_device,
)
from rft_engine.process.settings import ExternalEngineSettings

_GIB = r"([\d.]+) ?GiB"
_NO_ROOM_AT_START = re.compile(
    rf"memory on (?:device \S*?(\d+)|node \S+) \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired "
    rf"[GC]PU memory utilization \(([\d.]+), {_GIB}\)"
)
_ONE_SEQUENCE = re.compile(
    rf"max seq len \((\d+)\), \({_GIB} KV cache is needed.*?available KV cache memory \({_GIB}\)"
    r"(?:.*?estimated maximum model length is (\d+))?",
    re.DOTALL,
)
_NO_BLOCKS = re.compile(r"No available memory for the cache blocks")
_WARM_UP = re.compile(r"warming up sampler with (\d+) dummy requests")
_TORCH = re.compile(
    rf"CUDA out of memory\. Tried to allocate ([\d.]+ [GMK]iB)\.(?: GPU (\d+) has a total capacity of {_GIB})?"
)
_HOST_CACHE = re.compile(
    r"memory on node \S+ \(([\d.]+)/([\d.]+) GiB\) on kv cache allocation is less than requested memory for kv "
    r"\(([\d.]+)"
)
_HOST = re.compile(r"Cannot allocate memory|DefaultCPUAllocator: can't allocate memory|Errno 12")

_BLOCK = 16  # tokens of a block of vLLM's cache on a GPU
_USUAL_SHARE, _MOST_SHARE, _LEAST_SHARE = 0.92, 0.95, 0.05  # vLLM's default; what is worth trying
_OWN_MARGIN_MIB = 512  # of what is free, left to the contexts of other libraries


def memory_error(settings: ExternalEngineSettings, words: str, inventory: Inventory) -> ServiceError | None:
    """Return the error of a start that failed for memory, with the setting that helps.

    Args:
        settings: what was asked for.
        words: vLLM's error, or the end of its log.
        inventory: processes that hold the GPUs.

    Returns:
        The error to raise; None where the words are about something else.
    """
    # a log breaks a message into lines anywhere
    words = " ".join(words.split())
    if match := _NO_ROOM_AT_START.search(words):
        number, free, total, share, wanted = match.groups()
        # asked for only where the message is about memory: it starts nvidia-smi
        device = visible_device(inventory(), int(number)) if number else None
        return _taken(settings, device, float(free), float(total), float(share), float(wanted))
    if match := _ONE_SEQUENCE.search(words):
        return _one_sequence(settings, match, inventory())
    if _NO_BLOCKS.search(words):
        return _no_blocks(settings)
    if match := _WARM_UP.search(words):
        return _rows(settings, int(match[1]))
    # after vLLM's own messages: torch's may stand in the same log, and says less
    if match := _TORCH.search(words):
        return _torch(settings, match, inventory())
    if match := _HOST_CACHE.search(words):
        return _host(settings, f"the cache takes {match[3]} GiB, {match[1]} of {match[2]} GiB are free")
    if _HOST.search(words):
        return _host(settings, "the system could not allocate memory for vLLM")
    return None


def _taken(
    settings: ExternalEngineSettings, device: Device | None, free: float, total: float, share: float, wanted: float
) -> ServiceError:
    """Return the error that more was asked for than is free when vLLM starts."""
    # rounded down, because a share that is a little too high fails in the same way
    fitting = _down((free - _OWN_MARGIN_MIB / 1024) / total)
    what = f"vLLM requests {wanted:g} GiB ({share:g} of {total:g}); {free:g} GiB are free"
    others = other_processes(device)
    smaller = f"--engine_mem_util {fitting:g}" if fitting >= _LEAST_SHARE else ""
    # who holds more is named: to end a small process beside a large trainer would not help
    if others and sum(process.used_mib for process in others) >= _most_own(device):
        largest = others[0]
        remedy = f"end process {largest.pid} ({largest.name})" + (f", or {smaller}" if smaller else "")
        return _error("others", what, settings, device, "other processes hold the device", remedy)
    own = _own(device)
    if own:
        why = f"this run itself holds {own[0].used_mib} MiB of the device"
        remedy = smaller or "--engine_tp_size on more GPUs, or vLLM on a GPU of its own (CUDA_VISIBLE_DEVICES)"
        return _error("own", what, settings, device, why, remedy)
    # a tenth and not any: the driver itself holds memory that belongs to no process
    if device is not None and device.hidden_mib > 0.1 * device.total_mib:
        why = f"{device.hidden_mib} MiB are held by processes that cannot be seen from here (another container)"
        remedy = "ask for a free device" + (f", or {smaller}" if smaller else "")
        return _error("hidden", what, settings, device, why, remedy)
    why = "the share is of all memory, and must fit into what is free when vLLM starts"
    return _error("share_too_high", what, settings, device, why, smaller or "a device with more free memory")


def _one_sequence(settings: ExternalEngineSettings, match: re.Match[str], devices: Sequence[Device]) -> ServiceError:
    """Return the error that the cache holds less than one sequence of the greatest length."""
    length, needed, available = int(match[1]), float(match[2]), float(match[3])
    blocks = math.ceil(length / _BLOCK)
    available_blocks = int(blocks * available / needed) if needed else 0
    what = (
        f"1 sequence of {length} tokens needs {blocks} blocks of {_BLOCK} tokens ({needed:g} GiB), "
        f"{available_blocks} are there ({available:g} GiB)"
    )
    share, device = settings.memory_utilization or _USUAL_SHARE, visible_device(devices, 0)
    remedies = [f"--max_len {match[4]}"] if match[4] else []
    if device is not None:
        enough = _up(share + (needed - available) * 1024 / device.total_mib)
        if enough <= _MOST_SHARE:
            remedies.insert(0, f"--engine_mem_util {enough:g}")
    why = "keys and values of one sequence of max_len must fit beside the weights"
    remedy = ", or ".join(remedies) or f"--engine_tp_size {2 * settings.tensor_parallel_size}, or a smaller --max_len"
    return _error("length", what, settings, device, why, remedy)


def _no_blocks(settings: ExternalEngineSettings) -> ServiceError:
    share = settings.memory_utilization or _USUAL_SHARE
    what = f"weights and workspace take all of the share of {share:g}: no block is left for keys and values"
    more = min(_MOST_SHARE, _up(share + 0.1))
    if share < _MOST_SHARE - 0.03:
        return _error(
            "share_too_low", what, settings, None, "the cache is what the share leaves", f"--engine_mem_util {more:g}"
        )
    remedy = f"--engine_tp_size {2 * settings.tensor_parallel_size}, --engine_fp8, or a larger device"
    return _error("model_too_large", what, settings, None, "the model does not fit beside a cache", remedy)


def _rows(settings: ExternalEngineSettings, num_rows: int) -> ServiceError:
    what = f"no memory was left to draw for {num_rows} sequences at once"
    why = "logits of every row over the whole vocabulary are held beside weights and cache"
    share = settings.memory_utilization or _USUAL_SHARE
    remedy = f"--engine_max_rows {max(num_rows // 2, 1)}, or --engine_mem_util {_down(share - 0.05):g}"
    return _error("rows", what, settings, None, why, remedy)


def _torch(settings: ExternalEngineSettings, match: re.Match[str], devices: Sequence[Device]) -> ServiceError:
    """Return the error that torch's allocator ran out during the start: due to other processes, or the share itself."""
    device = visible_device(devices, int(match[2] or 0))
    what = f"no room for another {match[1]}" + (f" on a device of {match[3]} GiB" if match[3] else "")
    others = other_processes(device)
    share = settings.memory_utilization or _USUAL_SHARE
    smaller = f"--engine_mem_util {_down(0.8 * share):g}"
    if device is not None and others and sum(process.used_mib for process in others) > 0.1 * device.total_mib:
        remedy = f"end process {others[0].pid} ({others[0].name}), or {smaller}"
        return _error("others", what, settings, device, "other processes hold the device", remedy)
    why = "weights, workspace and cache were planned with the share that was asked for"
    return _error("share_too_high", what, settings, device, why, f"{smaller}, or a smaller --engine_max_rows")


def _host(settings: ExternalEngineSettings, what: str) -> ServiceError:
    why = "weights and cache of a CPU build, and the pages that GPUs read from, come from the memory of the host"
    rows = f"--engine_max_rows {max(settings.max_rows // 2, 1)}"
    return _error("host", what, settings, None, why, f"free memory on this machine, {rows}, or a smaller --max_len")


def _own(device: Device | None) -> list[DeviceProcess]:
    """Processes of this run: this one, and the trainer that started it."""
    own = {os.getpid(), os.getppid()}
    own_processes = [] if device is None else [process for process in device.processes if process.pid in own]
    return sorted(own_processes, key=lambda process: -process.used_mib)


def _most_own(device: Device | None) -> int:
    return max((process.used_mib for process in _own(device)), default=0)


def _error(
    name: str, what: str, settings: ExternalEngineSettings, device: Device | None, why: str, remedy: str
) -> ServiceError:
    holders = held_by(device)
    return ServiceError(
        code=f"engine.vllm.memory.{name}",
        what=f"vLLM did not start: {what}",
        where=f"vLLM engine for {settings.model_dir}, {settings.max_rows} rows of {settings.max_len} tokens"
        + (f"; the device is held by {holders}" if holders else ""),
        why=why,
        state="nothing was started",
        do=remedy,
    )


def _down(share: float) -> float:
    return math.floor(share * 100) / 100


def _up(share: float) -> float:
    return math.ceil(share * 100 - 1e-9) / 100
