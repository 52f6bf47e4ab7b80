"""`python -m rft_cli.pretrain ...`, in the place of the guide's `python -m llm.training.train ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rft_cli import main as program
from rft_cli.pretrainer.fields import COMMAND


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rft-train pretrain ARGV...` and return its exit code."""
    return program.main([COMMAND, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
