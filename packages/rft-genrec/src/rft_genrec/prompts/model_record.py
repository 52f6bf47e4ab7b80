"""genrec.json: the IDs and the prompts that a model was trained on, in a file beside its tokenizer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rft_core.errors import DataError
from rft_genrec.catalogue.records import SemanticIds
from rft_genrec.prompts.builder import PromptBuilder, Template

FILE = "genrec.json"


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """Record of the IDs and prompts that a model was trained on."""

    ids: str
    """Digest of the semantic IDs."""
    max_history: int
    template: Template
    prompt: str
    """Digest of the builder of prompts."""

    @classmethod
    def of(cls, builder: PromptBuilder) -> ModelRecord:
        """Return the record of models that are trained on prompts of a builder."""
        return cls(builder.ids.digest, builder.max_history, builder.template, builder.digest)

    def write(self, directory: Path) -> None:
        """Write the record into a model's directory."""
        (directory / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_record(directory: str | Path) -> ModelRecord | None:
    """Return the record in a model's directory; None where there is none.

    Raises:
        DataError: a file that is no record.
    """
    path = Path(directory) / FILE
    if not path.is_file():
        return None
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        found = None
    fields = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    record = ModelRecord(*(fields.get(name) for name in ("ids", "max_history", "template", "prompt")))  # pyright: ignore[reportArgumentType]
    texts = (record.ids, record.template, record.prompt)
    if not all(isinstance(text, str) for text in texts) or type(record.max_history) is not int:
        raise DataError(
            code="genrec.damaged_record",
            what=f"{FILE} is no record of a model: {str(found)[:80]!r}",
            where=str(path),
            why="it has the texts ids, template and prompt, and the number max_history",
            do="copy the model's directory again",
        )
    return record


def builder_of(directory: str | Path, ids: SemanticIds) -> PromptBuilder:
    """Return the builder of the prompts that a model was trained on, over the same IDs.

    Raises:
        DataError: the model was not trained on IDs, or on others, or its prompts are made otherwise now.
    """
    record = read_record(directory)
    if record is None:
        raise DataError(
            code="genrec.no_record",
            what=f"there is no {FILE} in {directory}",
            where=str(directory),
            why="it says which IDs and prompts the model was trained on; without it they could only be guessed",
            do="--pretrain with a model that `rft-train genrec sft` has trained",
        )
    if record.ids != ids.digest:
        raise other_ids(record, ids, directory)
    builder = PromptBuilder(ids, record.max_history, record.template)
    if builder.digest != record.prompt:
        raise DataError(
            code="genrec.other_prompts",
            what=f"the prompts of the model have the digest {record.prompt[:12]}, those of now {builder.digest[:12]}",
            where=str(Path(directory) / FILE),
            why="a model answers the prompts that it was trained on; other ones give worse answers without an error",
            do="take the version of rft-genrec that trained the model, or train it again",
        )
    return builder


def other_ids(record: ModelRecord, ids: SemanticIds, directory: str | Path) -> DataError:
    """Return the error of a model that was trained on other IDs."""
    return DataError(
        code="genrec.other_ids",
        what=f"the model was trained on the IDs {record.ids[:12]}, the catalogue has {ids.digest[:12]}",
        where=str(Path(directory) / FILE),
        why="the same tokens stand for other items in another index",
        do="--sid_index_path with the index of the model, or train a model on this one",
    )
