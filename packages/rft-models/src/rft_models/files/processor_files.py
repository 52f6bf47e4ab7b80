"""Processor files of a vision-language directory, beside weights, configuration and tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def keep_processor_files(source: str | Path, target: str | Path) -> None:
    """Copy the processor files that `target` lacks: a run on text alone never reads them, but other users will."""
    for name in PROCESSOR_FILES:
        if (Path(source) / name).is_file() and not (Path(target) / name).exists():
            shutil.copyfile(Path(source) / name, Path(target) / name)
