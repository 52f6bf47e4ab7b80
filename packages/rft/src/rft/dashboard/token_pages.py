"""Tokens of the answers of a group, a number each: the tokenizer of a run and the records of a step are kept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from rft.dashboard.run_folders import RequestRefused, RunFolders
from rft.library.run import Run
from rft.library.token_numbers import QUANTITIES, group_tokens
from rft_core.checkpoint_places import other_places
from rft_trainer.rollout_files.token_records import TokenRecord, token_file

_MOST_TOKENS = 5000
"""Of one answer."""


class _KeptRun(Run):
    """A run whose tokenizer and last records are read once."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._tokenizer: Any = None
        self._records: tuple[tuple[int, int], list[TokenRecord]] | None = None

    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = super().tokenizer()
        return self._tokenizer

    def tokens(self, step: int | None = None) -> list[TokenRecord]:
        file = token_file(self.path / "rollouts", step or 0)
        # written anew where a resumed run makes the step again
        key = (step or 0, file.stat().st_mtime_ns if file.exists() else 0)
        if self._records is None or self._records[0] != key:
            self._records = (key, super().tokens(step))
        return self._records[1]


class TokenPages:
    """Tokens with numbers, of one run at a time."""

    def __init__(self, folders: RunFolders) -> None:
        self._folders = folders
        self._run: _KeptRun | None = None
        self._lock = threading.Lock()

    def tokens(self, run: Path, step: int, prompt_id: str, quantity: str) -> dict[str, Any]:
        """Return the tokens of the answers to a prompt as plain JSON: by sample, their texts and their numbers.

        Raises:
            RequestRefused: no such quantity, or a file of the run leads out of the folders.
        """
        if quantity not in QUANTITIES:
            raise RequestRefused(400, f"quantity is one of {', '.join(QUANTITIES)}")
        with self._lock:
            self._folders.inside(token_file(run / "rollouts", step))
            if self._run is None or self._run.path != run:
                self._check_checkpoints(run)
                self._run = _KeptRun(run)
            found = group_tokens(self._run, step, prompt_id, quantity)
        answers = {
            str(sample): {"pieces": list(one.pieces[:_MOST_TOKENS]), "numbers": list(one.numbers[:_MOST_TOKENS])}
            for sample, one in found.answers.items()
        }
        return {"answers": answers, "why_none": found.why_none}

    def _check_checkpoints(self, run: Path) -> None:
        """Look at every file and folder that a tokenizer may be read from."""
        for place in other_places(run / "checkpoints"):
            self._folders.inside(place)
        for file in (run / "checkpoints").rglob("*"):
            if file.is_symlink():
                self._folders.inside(file)
