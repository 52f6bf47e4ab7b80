"""Records of sampled responses token by token, a file of Arrow a step: `rollouts/tokens_000010.arrow`.

Any reader of Arrow IPC files opens them; the schema's metadata hold name and version of the form.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from rft_core.durable_files import replace_bytes
from rft_core.errors import DataError

FORM, VERSION = "rft token records", 1
_KEY_FORM, _KEY_VERSION = b"form", b"version"
_FILE = re.compile(r"tokens_(\d{6,})\.arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """One response; what has a number a token has the length of `token_ids`, or is None where it was not computed.

    Log-probs and entropies are in nats, at the sampling temperature.
    """

    prompt_id: str
    sample: int
    """Number of the response among those to its prompt."""
    prompt_ids: tuple[int, ...]
    """Tokens of the prompt."""
    token_ids: tuple[int, ...]
    """Tokens behind the prompt: of the response, and in a conversation of observations too."""
    mask: tuple[bool, ...]
    """True where the policy sampled the token."""
    versions: tuple[int, ...]
    """Version of the weights that drew each token."""
    engine_logprobs: tuple[float, ...]
    """Under the engine that sampled them; 0 where the policy did not."""
    trainer_logprobs: tuple[float, ...] | None
    """Under the weights that the step began with, by the trainer's forward."""
    entropies: tuple[float, ...] | None
    """Of the distribution that each token was drawn from, by the trainer's forward."""
    reference_logprobs: tuple[float, ...] | None
    """Under the reference policy, where the algorithm compares with one."""
    advantages: tuple[float, ...] | None
    """None where the response was left out of the step."""
    reward: float | None
    status: str
    finish_reason: str


def token_file(folder: Path, step: int) -> Path:
    """Return the file of a step in a folder of rollouts."""
    return folder / f"tokens_{step:06d}.arrow"


def token_files(folder: Path) -> dict[int, Path]:
    """Return the files by their steps, in order."""
    found = {int(match[1]): file for file in folder.glob("tokens_*.arrow") if (match := _FILE.fullmatch(file.name))}
    return dict(sorted(found.items()))


@cache
def schema() -> Any:
    """Return the Arrow schema of a file."""
    import pyarrow as pa

    numbers, ids = pa.list_(pa.float32()), pa.list_(pa.int32())
    types = {
        "prompt_id": pa.string(),
        "sample": pa.int32(),
        "prompt_ids": ids,
        "token_ids": ids,
        "mask": pa.list_(pa.bool_()),
        "versions": ids,
        "engine_logprobs": numbers,
        "trainer_logprobs": numbers,
        "entropies": numbers,
        "reference_logprobs": numbers,
        "advantages": numbers,
        "reward": pa.float64(),
        "status": pa.string(),
        "finish_reason": pa.string(),
    }
    assert list(types) == [field.name for field in fields(TokenRecord)]
    return pa.schema(list(types.items()), {_KEY_FORM: FORM.encode(), _KEY_VERSION: str(VERSION).encode()})


def write_token_records(file: Path, records: Sequence[TokenRecord]) -> None:
    """Write the records of a step, whole or not at all; the same records give the same bytes.

    Raises:
        StorageError: the disk refuses.
    """
    import pyarrow as pa

    columns = {
        field.name: _column([getattr(record, field.name) for record in records], field.type) for field in schema()
    }
    buffer = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(buffer, schema(), options=options) as writer:
        writer.write_table(pa.table(columns, schema=schema()))
    replace_bytes(file, buffer.getvalue())


def _column(values: Sequence[Any], kind: Any) -> Any:
    """Return a column of Arrow; lists go in as one array of their numbers, since a step may have millions of them."""
    # readers of records start without torch
    import pyarrow as pa
    import torch

    from rft_trainer.records.flat_numbers import flat_tensor

    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    rows = [() if value is None else value for value in values]
    absent = [value is None for value in values]
    ends = torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int32)
    dtype = {"float": torch.float32, "int32": torch.int32, "bool": torch.bool}[str(kind.value_type)]
    numbers = flat_tensor(rows, dtype)
    return pa.ListArray.from_arrays(
        _array(ends, pa.int32()),
        _array(numbers, kind.value_type),
        type=kind,
        mask=pa.array(absent, pa.bool_()) if any(absent) else None,
    )


def _array(numbers: Any, kind: Any) -> Any:
    """Return a tensor as an array of Arrow over its memory; `pa.array` loads pandas, which takes a second."""
    import numpy as np
    import pyarrow as pa

    values = numbers.numpy()
    # Arrow has 8 truth values in a byte
    data = np.packbits(values, bitorder="little") if pa.types.is_boolean(kind) else values
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])


def read_token_records(file: Path) -> list[TokenRecord]:
    """Read the records of a step.

    Raises:
        DataError: no such file, a damaged one, or one of another form or version.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
            _require_form(file, reader.schema.metadata or {}, reader.schema.names)
            rows = reader.read_all().to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, " ".join(str(error).split())[:200], "it is no whole Arrow file") from error
    return [_record(file, number, row) for number, row in enumerate(rows, start=1)]


def _record(file: Path, number: int, row: dict[str, Any]) -> TokenRecord:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    record = TokenRecord(**values)
    length = len(record.token_ids)
    for name in ("mask", "versions", "engine_logprobs", *_OPTIONAL):
        if values[name] is not None and len(values[name]) != length:
            what = f"record {number}: {name} has {len(values[name])} entries, {length} tokens"
            raise _unreadable(file, what, "each token has an entry")
    return record


_OPTIONAL = ("trainer_logprobs", "entropies", "reference_logprobs", "advantages")


def _require_form(file: Path, metadata: dict[bytes, bytes], names: Sequence[str]) -> None:
    form, version = (metadata.get(key, b"").decode(errors="replace") for key in (_KEY_FORM, _KEY_VERSION))
    if form != FORM or version != str(VERSION) or list(names) != schema().names:
        what = f"its form is {form!r}, version {version!r}" if form else "it names no form"
        raise _unreadable(file, what, f"{FORM!r}, version {VERSION}, are read here")


def _unreadable(file: Path, what: str, why: str) -> DataError:
    rows = f"{file.stem.replace('tokens_', 'step_')}.jsonl"
    return DataError(
        code="rollouts.token_records",
        what=f"{file.name}: {what}",
        where=str(file),
        why=why,
        state="nothing was changed; metrics and readable rows of the run do not need this file",
        do=f"read the responses in {rows} beside it",
    )
