"""Process that builds shards of a store for another one: a JSON line a shard in, and a line with its facts out.

Lines in:  {"directory": ..., "sources": [[file, ...], ...], "job": {...}}, then one `ShardPlan` a line
Lines out: {"facts": {...}} or, as the last one, {"error": {...}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rft_core.child_process import ParentPipes, error_fields
from rft_core.errors import DataError, RftError
from rft_trainer.data.store.build import Tokenize, build_shard
from rft_trainer.data.store.shard_plan import Place, ShardPlan, Span


def serve_builds(pipes: ParentPipes, make_tokenize: Callable[[Mapping[str, Any]], Tokenize]) -> None:
    """Build what the parent asks for until it closes its pipe, or a shard cannot be built.

    Args:
        pipes: to the parent.
        make_tokenize: makes from the job of the first line what tokenises.
    """

    def prepare(first: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
        directory, sources = Path(first["directory"]), [[Path(file) for file in files] for files in first["sources"]]
        tokenize = make_tokenize(first["job"])
        return lambda plan: asdict(build_shard(directory, sources, plan_of(plan), tokenize))

    serve_requests(pipes, prepare)


def serve_requests(
    pipes: ParentPipes, prepare: Callable[[Mapping[str, Any]], Callable[[Mapping[str, Any]], Mapping[str, Any]]]
) -> None:
    """Answer each line with facts until the parent closes its pipe, or a shard cannot be built.

    Args:
        pipes: to the parent.
        prepare: makes from the first line what builds: the JSON of a plan -> the JSON of the facts.
    """
    first = json.loads(next(pipes.requests))
    try:
        build = prepare(first)
        for line in pipes.requests:
            pipes.send(json.dumps({"facts": build(json.loads(line))}).encode())
    except DataError as error:
        # by its public kind: a class of this package is not one that the parent finds by name
        pipes.send(json.dumps({"error": error_fields(DataError(**asdict(error.problem)))}).encode())
    except RftError as error:
        pipes.send(json.dumps({"error": error_fields(error)}).encode())


def plan_of(record: Mapping[str, Any]) -> ShardPlan:
    """Return a plan that came as JSON."""
    spans = tuple(Span(Place(**span["begin"]), span["num_rows"]) for span in record["spans"])
    return ShardPlan(record["number"], spans, Place(**record["end"]))
