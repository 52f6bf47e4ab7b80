"""A run's stored settings as flags of another command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from rft.config.schema import schema
from rft_core.errors import DataError

_OF_TRAINING = (
    *("pretrain", "temperature", "top_p", "top_k", "min_p"),
    *("prompt_data", "max_samples", "n_samples_per_prompt", "shuffle_images", "nproc", "restarts"),
)
"""Settings of a run that say how it trained, not how it is evaluated."""


def names_run(argv: Sequence[str]) -> bool:
    """Return True when the first word is a run in place of the model, as in `rft-train eval RUN`."""
    return bool(argv) and not argv[0].startswith("-")


def with_run(argv: Sequence[str], command: str) -> list[str]:
    """Replace a run that stands first by the flags that repeat what it did, on its newest checkpoint.

    Flags that are given come last and win. The run's own sampling is left out: an evaluation is drawn as the run's
    evaluations were, greedily unless `eval_temperature` or flags say otherwise.
    """
    if not names_run(argv):
        return list(argv)
    from rft.stages.evaluate import trained_model  # here, so that pages do not wait for torch

    trained = trained_model(Path(argv[0]), asked_by=f"rft-train {command}")
    values = read_values(trained.run / "config.yaml")
    kept = {name: value for name, value in values.items() if name not in _OF_TRAINING}
    if values.get("held_out_share"):
        kept["prompt_data"] = values["prompt_data"]  # whose end was held out
    # an evaluation command has the columns and the temperature of held-out rows alone
    for name in ("input_key", "label_key", "temperature"):
        kept[name] = values.get(f"eval_{name}") or kept.get(name)
    return [*as_words(kept, command), "--pretrain", str(trained.model_directory), *argv[1:]]


def read_values(config: Path) -> dict[str, Any]:
    """The settings of a config.yaml by flat name."""
    if not config.is_file():
        raise DataError(
            code="run.no_config",
            what=f"{config} does not exist",
            where=str(config.parent),
            why="a run's settings are read from its config.yaml",
            do="give --pretrain and --eval_data instead of the run",
        )
    try:
        content: object = yaml.safe_load(config.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            code="run.bad_config",
            what=f"{config} cannot be read: {str(error).partition(chr(10))[0]}",
            where=str(config),
            why="a run's settings are read from its config.yaml, one `name: value` a line",
            do="give --pretrain and --eval_data instead of the run",
        ) from error
    values: dict[str, Any] = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    values.pop("recipe", None)
    return values


def as_words(values: Mapping[str, Any], command: str) -> list[str]:
    """Return the values that `command` has, as its flags; a null or empty value is left to its default."""
    words: list[str] = []
    for name in schema(command):
        value = values.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, list):
            words += [f"--{name}", *(str(item) for item in cast("list[Any]", value))]
        else:
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words
