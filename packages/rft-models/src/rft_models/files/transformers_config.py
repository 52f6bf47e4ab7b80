"""The configuration of a directory as transformers reads it, with this package's attention in the place of the file's.

A file may name code of somebody's repository as its attention, which transformers would fetch and run, or a kernel that
is not here.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rft_core.errors import DataError
from rft_models.own_decoder.registration import register_for

_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
)
"""What transformers raises for values that it does not expect, whatever its code was doing with them."""


def hf_config(path: Path, attention: str = "sdpa") -> Any:
    """Return the configuration of a directory with this attention, whatever the file asks for, in its parts too.

    Raises:
        DataError: transformers refuses a value of it.
    """
    import transformers

    register_for(path)
    with refusals(path):
        config: Any = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part._attn_implementation = attention
    return config


@contextmanager
def refusals(path: Path, *more: type[Exception]) -> Generator[None]:
    """Turn what transformers raises for a value of config.json, and `more`, into a `DataError` with its first words."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (*_REFUSALS, *more, StrictDataclassError) as error:
        raise refused_config(path, error) from error


def refused_config(path: Path, error: Exception) -> DataError:
    """Return the error that transformers makes no model with the configuration of a directory."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return DataError(
        code="models.config_refused",
        what=f"transformers refuses config.json: {type(error).__name__}: {' '.join(lines[:3])[:300]}",
        where=str(path / "config.json"),
        why="a field has a value that this architecture cannot be made with, or needs a package that is not here",
        do="copy config.json of the model again",
    )
