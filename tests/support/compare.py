"""What two runs left behind, compared to the bit; only clocks and memory may differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_CLOCKS = ("time/", "memory/")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines without clocks and memory; every line must be whole."""
    lines = file.read_text().split("\n")
    assert lines.pop() == "", f"{file} ends within a line"
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(_CLOCKS)} for row in rows]


def checkpoints(run: Path) -> list[Path]:
    """Published checkpoints in order of steps."""
    return sorted((run / "checkpoints").glob("step_*[0-9]"))


def final_checkpoint(run: Path) -> Path:
    """The one of the highest step."""
    return checkpoints(run)[-1]


def tensors(run: Path, file: str) -> dict[str, Tensor]:
    """The tensors of one file of the final checkpoint."""
    return load_file(final_checkpoint(run) / file)


def differing_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that differ in a bit, a shape or a type, or are in one only."""
    names = sorted(set(a) ^ set(b))
    return names + [name for name in sorted(set(a) & set(b)) if not same_bits(a[name], b[name])]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN, 0 differs from -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def state_records(run: Path) -> dict[str, Any]:
    """The JSON state of the final checkpoint, without clocks."""
    found = {}
    for file in sorted((final_checkpoint(run) / "state").glob("*.json")):
        found[file.stem] = {k: v for k, v in json.loads(file.read_text()).items() if k != "seconds"}
    return found


def differences(expected: Path, found: Path) -> list[str]:
    """What differs between two finished runs, in words; empty where they are the same to the bit."""
    told: list[str] = []
    if final_checkpoint(expected).name != final_checkpoint(found).name:
        return [f"final checkpoint {final_checkpoint(expected).name}, {final_checkpoint(found).name}"]
    for file in ("model/model.safetensors", "state/optimizer.safetensors"):
        different = differing_tensors(tensors(expected, file), tensors(found, file))
        told += [f"{file}: {len(different)} tensors differ: {different[:3]}"] if different else []
    if state_records(expected) != state_records(found):
        told.append(f"state: {state_records(expected)} {state_records(found)}")
    for name in ("metrics.jsonl", "evals.jsonl"):
        # a run without an evaluation has no file of them
        rows = [read_rows(run / name) if (run / name).exists() else [] for run in (expected, found)]
        told += [f"{name}: {line}" for line in _differing_rows(*rows)]
    told += _differing_files(expected / "rollouts", found / "rollouts")
    told += _differing_summaries(expected, found)
    return told


def _differing_rows(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[str]:
    steps_a, steps_b = [row["step"] for row in a], [row["step"] for row in b]
    if steps_a != steps_b:
        return [f"steps {steps_a}, {steps_b}"]
    pairs = ((x, y) for x, y in zip(a, b, strict=True) if x != y)
    return [
        f"step {x['step']}: "
        + ", ".join(f"{k} {x.get(k)} {y.get(k)}" for k in sorted({*x, *y}) if x.get(k) != y.get(k))
        for x, y in pairs
    ]


def _files(folder: Path) -> set[str]:
    """Every file below a folder, by its way from there; none where it is not."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _differing_files(a: Path, b: Path) -> list[str]:
    names_a, names_b = (_files(folder) for folder in (a, b))
    told = [f"{a.name}/{name} is in one only" for name in sorted(names_a ^ names_b)]
    both = sorted(names_a & names_b)
    return told + [f"{a.name}/{n} differs" for n in both if (a / n).read_bytes() != (b / n).read_bytes()]


def _differing_summaries(a: Path, b: Path) -> list[str]:
    read = [json.loads((run / "summary.json").read_text()) for run in (a, b)]
    # what bounds the speed is read off times, which no two runs share
    kept = [{k: v for k, v in summary.items() if k not in ("seconds", "speed")} for summary in read]
    return [] if kept[0] == kept[1] else [f"summary.json: {kept[0]} {kept[1]}"]


def relative_distance(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
    """|a - b| / |b| in L2 over all entries, in float64."""
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True)]
    apart = sum(float((x - y).square().sum()) for x, y in pairs)
    size = sum(float(y.square().sum()) for _, y in pairs)
    return (apart / size) ** 0.5 if size else apart**0.5
