"""Building of a stream of tokens: its shards, one by one or in workers, and the manifest of all of them.

A build that was stopped goes on with the shards that are missing. A shard that is damaged is named and built anew.
Several processes that want one stream wait for the first of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rft_core.durable_files import replace_record, storage_errors
from rft_core.errors import DataError
from rft_trainer.data.store.published_file import shard_path
from rft_trainer.data.token_shards.encode import TokenEncoder, build_token_shard
from rft_trainer.data.token_shards.text_plan import BYTES_OF_SHARD, Cut, TextShardPlan, TextStream
from rft_trainer.data.token_shards.token_file import VERSION, TokenShardFacts, sound_shard, token_type

_LOG = logging.getLogger(__name__)
_MANIFEST = "manifest.json"

BuildTokens = Callable[[Path, TextStream, Iterator[TextShardPlan]], Iterator[TokenShardFacts]]
"""(directory, stream, plans) -> the facts of the shards in order, each built."""


@dataclass(frozen=True, slots=True)
class BuiltStream:
    """A stream of tokens on disk."""

    directory: Path
    shards: tuple[TokenShardFacts, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards."""
        return sum(facts.num_tokens for facts in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of the text as UTF-8."""
        return sum(facts.num_bytes for facts in self.shards)

    @property
    def num_documents(self) -> int:
        """Documents that begin in it."""
        return sum(facts.num_documents for facts in self.shards)

    @property
    def content_hash(self) -> str:
        """SHA-256 of the tokens."""
        return hashlib.sha256("".join(facts.sha256 for facts in self.shards).encode()).hexdigest()


def in_this_process(tokenizer: TokenEncoder, *, stopped: Callable[[], bool] = lambda: False) -> BuildTokens:
    """Return what builds one shard after the other here.

    `stopped` is asked after every block of text: whether the process was asked to stop.
    """

    def build(directory: Path, stream: TextStream, plans: Iterator[TextShardPlan]) -> Iterator[TokenShardFacts]:
        for plan in plans:
            yield build_token_shard(directory, stream, plan, tokenizer, stopped=stopped)

    return build


def build_stream(
    root: Path,
    stream: TextStream,
    tokenizer: TokenEncoder,
    build: BuildTokens,
    *,
    bytes_of_shard: int = BYTES_OF_SHARD,
) -> BuiltStream:
    """Build what is missing of a stream, and return it.

    Args:
        root: directory of all stores; that of the stream follows from its text and the tokenizer.
        stream: the text.
        tokenizer: makes the tokens.
        build: `in_this_process`, or workers.
        bytes_of_shard: text of a shard, about.

    Raises:
        KeyboardInterrupt: the process was asked to stop; the next build goes on with the missing shards.
        DataError: a text cannot be used, or there is none.
        StorageError: the store cannot be written.
    """
    record = {**stream_record(stream, tokenizer), "bytes_of_shard": bytes_of_shard}
    directory = root / hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]
    with storage_errors("make the data store", directory):
        directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory):
        dtype = token_type(tokenizer.vocab_size)
        shards = _complete(directory, dtype)
        if shards is None:
            _clear(directory, dtype)
            shards = [*build(directory, stream, stream.plans(bytes_of_shard))]
            if not any(facts.num_tokens for facts in shards):
                raise _no_text(stream)
            with storage_errors("make the data store", directory):
                hashes = [facts.sha256 for facts in shards]
                replace_record(directory / _MANIFEST, {**record, "num_shards": len(shards), "shards": hashes})
    return BuiltStream(directory, tuple(shards))


def stream_record(stream: TextStream, tokenizer: TokenEncoder) -> dict[str, Any]:
    """Return what the tokens of a stream follow from: the files by place, size and time, and the tokenizer."""
    stats = [(str(file.resolve()), file.stat()) for file in stream.files]
    return {
        "version": VERSION,
        "tokenizer": tokenizer.digest,
        "token_type": np.dtype(token_type(tokenizer.vocab_size)).name,
        "files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        "text_separator": stream.separator,
        "text_key": stream.text_key,
        "begin": _place(stream.begin),
        "end": _place(stream.end),
    }


def _place(cut: Cut | None) -> list[int] | None:
    return None if cut is None else [cut.file, cut.offset]


def _complete(directory: Path, dtype: Any) -> list[TokenShardFacts] | None:
    """Return the shards of a stream that is complete and sound; None of one that must be built."""
    try:
        manifest: Mapping[str, Any] = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        hashes = [str(value) for value in manifest["shards"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    shards: list[TokenShardFacts] = []
    for number, expected in enumerate(hashes):
        facts = sound_shard(directory, number, dtype)
        if facts is None or facts.sha256 != expected:
            return None
        shards.append(facts)
    return shards


def _clear(directory: Path, dtype: Any) -> None:
    """Remove what a kill left over, and shards that are damaged, which are named."""
    for left in directory.glob(".shard_*"):
        shutil.rmtree(left, ignore_errors=True)
    for path in sorted(directory.glob("shard_*")):
        number = int(path.name.removeprefix("shard_"))
        if sound_shard(directory, number, dtype) is None:
            _LOG.warning("%s is not what its manifest says: it is built anew", shard_path(directory, number))
            with storage_errors("remove a damaged shard", path):
                shutil.rmtree(path)


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Let one process build at a time; the lock of one that was killed is free."""
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _no_text(stream: TextStream) -> DataError:
    return DataError(
        code="data.no_texts",
        what=f"{', '.join(map(str, stream.files[:3]))} gives no token",
        where=f"{stream.files[0]}:1",
        why="a model is trained on the tokens of texts",
        do=f"write text to {stream.files[0]} or leave it out of --prompt_data",
    )
