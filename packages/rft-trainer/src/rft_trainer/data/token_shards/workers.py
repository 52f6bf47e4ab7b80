"""Shards of tokens from worker processes: the pool is that of the store of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rft_core.child_process import ParentPipes
from rft_trainer.data.store.build_requests import serve_requests
from rft_trainer.data.store.published_file import shard_path
from rft_trainer.data.store.worker_pool import BuildWorkers, in_processes
from rft_trainer.data.token_shards.encode import TokenEncoder, build_token_shard
from rft_trainer.data.token_shards.stream_building import BuildTokens
from rft_trainer.data.token_shards.text_plan import Cut, TextRange, TextShardPlan, TextStream
from rft_trainer.data.token_shards.token_file import TokenShardFacts, token_facts_of

FEWEST_SHARDS = 4
"""Shards that are worth the start of a process, which takes about two seconds, where nobody asks for workers."""


def tokens_in_workers(
    workers: BuildWorkers, few: BuildTokens, *, stopped: Callable[[], bool] = lambda: False
) -> BuildTokens:
    """Return what builds shards of tokens in worker processes, and with `few` where there are hardly any."""

    def build(directory: Path, stream: TextStream, plans: Iterator[TextShardPlan]) -> Iterator[TokenShardFacts]:
        first = {"directory": str(directory), "stream": {**asdict(stream), "files": [*map(str, stream.files)]}}
        here = partial(few, directory, stream)
        place = partial(shard_path, directory)
        return in_processes(first, workers, here, token_facts_of, place, stopped=stopped)(plans)

    return build


def serve_token_builds(pipes: ParentPipes, make_tokenizer: Callable[[Mapping[str, Any]], TokenEncoder]) -> None:
    """Build the shards that the parent asks for, with the tokenizer of the job of the first line."""

    def prepare(first: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
        tokenizer = make_tokenizer(first["job"])
        directory, stream = Path(first["directory"]), _stream_of(first["stream"])
        return lambda plan: asdict(build_token_shard(directory, stream, _plan_of(plan), tokenizer))

    serve_requests(pipes, prepare)


def _stream_of(record: Mapping[str, Any]) -> TextStream:
    cuts = {name: Cut(**record[name]) if record[name] else None for name in ("begin", "end")}
    return TextStream(**{**record, **cuts, "files": tuple(map(Path, record["files"]))})


def _plan_of(record: Mapping[str, Any]) -> TextShardPlan:
    return TextShardPlan(record["number"], tuple(TextRange(**one) for one in record["ranges"]))
