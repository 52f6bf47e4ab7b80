"""A worker that tokenises shards of a data store: `python -P -m rft.tokenizing.worker_main READ_FD WRITE_FD`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rft.tokenizing.kinds import StoredRowsText
from rft.tokenizing.texts import tokenizer_digest
from rft_core.child_process import ParentPipes
from rft_core.errors import DataError
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer
from rft_trainer.data.store.build import Tokenize
from rft_trainer.data.store.build_requests import serve_builds


def make_tokenize(job: Mapping[str, Any]) -> Tokenize:
    """Return what tokenises, with the parent's tokenizer; raises as `loaded_tokenizer` does."""
    return StoredRowsText.of(job["rows"]).tokenizer_of_rows(loaded_tokenizer(job))


def loaded_tokenizer(job: Mapping[str, Any]) -> HfTokenizer:
    """Return the parent's tokenizer.

    Raises:
        DataError: the files of the tokenizer are no longer those that the parent has loaded.
    """
    tokenizer = load_tokenizer(job["tokenizer"])
    if tokenizer_digest(tokenizer) != job["digest"]:
        raise DataError(
            code="store.other_tokenizer",
            what=f"{job['tokenizer']} is not the tokenizer that the run began with",
            where=str(job["tokenizer"]),
            why="all shards of a store are made by one tokenizer",
            do="start again while nothing writes to that directory",
        )
    return tokenizer


if __name__ == "__main__":
    serve_builds(ParentPipes(int(sys.argv[1]), int(sys.argv[2])), make_tokenize)
