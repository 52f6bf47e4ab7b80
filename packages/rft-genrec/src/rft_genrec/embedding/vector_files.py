"""Files of vectors: `.npy` and `.safetensors`, read strictly, and the JSON beside them that says what they are."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rft_core.durable_files import replace_bytes, replace_text
from rft_core.errors import DataError


def read_embeddings(path: str | Path, num_items: int) -> Tensor:
    """Read vectors, a row an item, as [N, D] float32.

    A `.npy` file is never unpickled; a `.safetensors` file holds one tensor.

    Raises:
        DataError: no such file, another shape than one row for each item, or a value that is not finite.
    """
    file = Path(path)
    if file.suffix == ".npy":
        values = _read_npy(file)
    elif file.suffix == ".safetensors":
        values = _read_safetensors(file)
    else:
        raise _refused(file, f"the name ends with {file.suffix!r}", "vectors are in a .npy or a .safetensors file")
    if values.ndim != 2 or not values.shape[1]:
        raise _refused(file, f"the shape is {tuple(values.shape)}", "a row an item and a column a number are needed")
    if len(values) != num_items:
        what = f"{len(values)} rows for {num_items} items"
        raise _refused(file, what, "row n is the vector of item n; the file was made for other items")
    bad_N = (~values.isfinite()).any(1)
    if bad_N.any():
        row = int(bad_N.nonzero()[0])
        what = f"{int(bad_N.sum())} rows hold NaN or infinity, the first is row {row}"
        raise _refused(file, what, "distances to a vector need finite numbers")
    return values.float()


def write_embeddings(file: Path, values: Tensor, facts: dict[str, Any]) -> None:
    """Write [N, D] as float32 to a `.npy` file, and the facts with the file's SHA-256 to a JSON beside it."""
    buffer = io.BytesIO()
    np.save(buffer, values.float().cpu().numpy(), allow_pickle=False)
    replace_bytes(file, buffer.getvalue())
    replace_text(file.with_suffix(".json"), json.dumps(facts, indent=2) + "\n")


def stored_facts(path: str | Path) -> dict[str, Any]:
    """Return what the JSON beside a file of vectors says of them; nothing where there is none."""
    file = Path(path).with_suffix(".json")
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def refuse_other_texts(path: str | Path, texts_sha256: str, facts: dict[str, Any]) -> None:
    """Refuse vectors whose JSON names other texts than those of the items.

    Raises:
        DataError: they were made of other texts.
    """
    stored = facts.get("texts_sha256", texts_sha256)
    if stored != texts_sha256:
        what = f"made of texts with the SHA-256 {str(stored)[:12]}..., the items' have {texts_sha256[:12]}..."
        raise _refused(Path(path), what, "row n is the vector of item n; the file was made for other items or texts")


def _read_npy(file: Path) -> Tensor:
    try:
        values = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _refused(file, f"it cannot be read: {error}", "a .npy file of numbers, without Python objects") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise _refused(file, f"it holds {getattr(values, 'dtype', type(values).__name__)}", "numbers are needed")
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _read_safetensors(file: Path) -> Tensor:
    try:
        with safe_open(str(file), framework="pt") as tensors:
            names = list(tensors.keys())
            if len(names) != 1:
                shown = ", ".join(names[:4]) or "none"
                raise _refused(file, f"it holds {len(names)} tensors ({shown})", "one tensor is needed")
            return tensors.get_tensor(names[0])
    except (OSError, SafetensorError) as error:
        raise _refused(file, f"it cannot be read: {error}", "a .safetensors file with one tensor") from error


def _refused(file: Path, what: str, why: str) -> DataError:
    return DataError(
        code="genrec.embeddings",
        what=f"{file.name}: {what}",
        where=str(file),
        why=why,
        do="make it anew with rft-train genrec embed",
    )
