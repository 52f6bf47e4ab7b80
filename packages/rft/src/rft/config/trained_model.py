"""The model of a run, where a run is given in the place of a model."""

from __future__ import annotations

from pathlib import Path


def newest_model(path: str) -> str:
    """Return the model of the newest checkpoint where `path` is a run, else `path`."""
    run = Path(path).expanduser()
    if not path or not (run / "config.yaml").is_file() or (run / "config.json").is_file():
        return path
    models = sorted(model for model in (run / "checkpoints").glob("step_*/model") if model.is_dir())
    return str(models[-1]) if models else path
