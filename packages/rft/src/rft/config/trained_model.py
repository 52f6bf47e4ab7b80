"""The model of a run, where a run is given in the place of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rft_core.checkpoint_places import step_directories

_MODELS = ("pretrain", "critic_pretrain", "reference_pretrain", "teacher_pretrain", "judge_pretrain", "agree_with")
_LISTS = ("reward_pretrain",)


def model_in_place_of_run(name: str, value: Any) -> Any:
    """Return the value of a setting, where it names a model by its run with the newest model of that run."""
    if name in _MODELS:
        return newest_model(value)
    return _newest_models(value) if name in _LISTS else value


def _newest_models(text: str) -> str:
    """Replace the runs in "[NAME=]DIR,...": where there are several, the name of a run becomes that of its model."""
    entries = text.split(",")
    changed: list[str] = []
    for entry in entries:
        name, equals, place = entry.strip().rpartition("=")
        model = newest_model(place)
        if model != place and not equals and len(entries) > 1:
            name, equals = Path(place).name, "="
        changed.append(entry if model == place else f"{name}{equals}{model}")
    return ",".join(changed)


def newest_model(path: str) -> str:
    """Return the model of a run's newest checkpoint, or of the checkpoint that `path` is; any other path as it is."""
    run = Path(path).expanduser()
    if not path or (run / "config.json").is_file():
        return path
    if (run / "manifest.json").is_file() and (run / "model").is_dir():
        return str(run / "model")
    if not (run / "config.yaml").is_file():
        return path
    if run.is_symlink():  # such as runs/latest, which stands for another run tomorrow
        run = run.parent / run.readlink()
    models = [model for saved in step_directories(run / "checkpoints") if (model := saved / "model").is_dir()]
    return str(models[-1]) if models else path
