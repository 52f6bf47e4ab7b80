"""The model of a run, where a run is given in the place of a model."""

from __future__ import annotations

from pathlib import Path


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
    models = sorted(model for model in (run / "checkpoints").glob("step_*/model") if model.is_dir())
    return str(models[-1]) if models else path
