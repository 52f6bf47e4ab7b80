"""A worker that tokenises shards of texts: `python -P -m rft.tokenizing.token_worker_main READ_FD WRITE_FD`."""

from __future__ import annotations

import sys

from rft.tokenizing.worker_main import loaded_tokenizer
from rft_core.child_process import ParentPipes
from rft_trainer.data.token_shards.workers import serve_token_builds

if __name__ == "__main__":
    serve_token_builds(ParentPipes(int(sys.argv[1]), int(sys.argv[2])), loaded_tokenizer)
