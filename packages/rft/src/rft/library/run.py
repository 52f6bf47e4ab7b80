"""A run as an object: its metrics as columns, its samples, its curves and its model.

Nothing is kept: every attribute is read from the run directory when it is asked for, so that a run that still trains
shows its last step.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from rft.library.run_columns import RunColumns
from rft_core.checkpoint_places import step_directories
from rft_core.errors import DataError, OptionsError, PreflightError
from rft_core.nearest_names import nearest_names
from rft_trainer.runs.reader import RunFiles, is_number, is_run, read_run, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from rft.library.given_rewards import GivenReward
    from rft_trainer.rollout_files.token_records import TokenRecord

Table = Literal["metrics", "evaluations", "samples"]
_CURVES = ("reward/mean", "sft/loss", "eval/accuracy", "eval/loss", "policy/entropy", "policy/gradient_norm")
"""What `Run.plot` draws where no names are given: those of them that the run has."""
_PANEL = (6.0, 2.2)
"""Width and height of a curve, in inches."""

_ELSEWHERE = {
    "train": "run.resume(), which trains on",
    "evaluate": "rft.evaluate(run, data, reward)",
    "predict": "rft.generate(run, prompts)",
    "generate": "rft.generate(run, prompts)",
    "save_model": "run.export(directory)",
    "save_pretrained": "run.export(directory)",
    "push_to_hub": "rft-train export {name} DIRECTORY --push_to_hub ORG/NAME",
    "log_history": "run.metrics",
    "history": "run.metrics",
    "state": "run.metrics",
}
"""Methods of other trainers, and what is called in their place."""


class Run:
    """A run of `rft-train rl`, `sft` or another command, finished or not.

    Example::

        run = rft.Run("runs/reversal")
        run.outcome                                 # "finished"
        run.metrics["reward/mean"][-1]              # 0.93
        run.evaluations["eval/accuracy"]            # [0.02, 0.88]
        [row["response"] for row in run.samples if row["reward"] == 0]
        run.plot().savefig("curves.png")
        model = run.model()                         # of transformers, with the tokenizer of run.tokenizer()
    """

    def __init__(self, directory: str | Path) -> None:
        """Take the run at `directory`.

        Raises:
            DataError: no run is there.
        """
        self.path = Path(directory).expanduser()
        if not is_run(self.path):
            raise _no_run(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self._files.name

    @property
    def command(self) -> str:
        """The command line that made the run."""
        return self._files.command

    @property
    def outcome(self) -> str:
        """Return "finished", "interrupted", "running" or another outcome; "stopped" where it was killed."""
        return self._files.outcome

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return self._files.step

    @property
    def settings(self) -> dict[str, str]:
        """Settings that are not defaults, as config.yaml has them."""
        return {name: value for name, (value, _) in self._files.settings.items()}

    @property
    def metrics(self) -> RunColumns:
        """Metrics of every step by name (docs/metrics.md), and "step"."""
        return RunColumns(self._files.metrics, str(self.path / "metrics.jsonl"))

    @property
    def evaluations(self) -> RunColumns:
        """Every evaluation of the held-out rows: "step", "name" and the columns `eval/...`."""
        return RunColumns(self._files.evaluations, str(self.path / "evals.jsonl"))

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Sampled responses with prompt, label, reward and "step", of the steps whose rollouts were kept."""
        kept: list[dict[str, Any]] = []
        for file in self._files.rollout_files:
            step = int(file.stem.removeprefix("step_"))
            kept += [{"step": step, **row} for row in rows(file)]
        return kept

    def tokens(self, step: int | None = None) -> list[TokenRecord]:
        """Return the records of a step's sampled answers token by token (docs/rollouts.md).

        Args:
            step: None = the last that was recorded.

        Raises:
            OptionsError: this step was not recorded, or none was.
            DataError: the file is damaged, or of another version.
        """
        from rft_trainer.rollout_files.token_records import read_token_records, token_files

        files = token_files(self.path / "rollouts")
        chosen = max(files, default=None) if step is None else step
        if chosen in files:
            return read_token_records(files[chosen])
        raise OptionsError(
            code="run.no_token_records",
            what=f"{self.path} has no record of the tokens of {'any step' if chosen is None else f'step {chosen}'}",
            where="Run.tokens",
            why=f"there are those of the steps {', '.join(map(str, files))}"
            if files
            else "a run on rewards writes them with the answers that it keeps as text (token_records='shown')",
            state="nothing was changed",
            do=f"run.tokens({min(files, key=lambda other: abs(other - (step or 0)))})"
            if files
            else "rft.rl(..., token_records='shown')",
        )

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the checkpoints, the oldest first."""
        return [int(name.removeprefix("step_")) for name in self._files.checkpoints]

    def resume(
        self,
        *,
        reward: GivenReward | None = None,
        callbacks: Sequence[Any] = (),
        panel: bool | None = None,
        **settings: object,
    ) -> Run:
        """Continue the run from its newest checkpoint that verifies, and return it when it has ended.

        The result is that of a run which was never interrupted, to the bit.

        Args:
            reward: the function, or functions, that the run was started with; none where its reward has a name.
            callbacks: `rft.Callback`s, called after every step and evaluation.
            panel: whether a panel is shown; None: in a notebook.
            **settings: of the run's command, in the place of the stored ones from here on.

        Raises:
            OptionsError: the reward of the run is a function, and none is given.
            CheckpointError: nothing is left to train, or no checkpoint verifies.
        """
        # looked up when it is called: it starts runs and returns them, and so stands above this module
        continues: Any = import_module("rft.library.resume")
        return continues.resumed(self, settings, reward, callbacks, panel=panel)

    def frame(self, table: Table = "metrics") -> Any:
        """Return metrics, evaluations or samples as a pandas frame, a row a step, an evaluation or a sample.

        Raises:
            PreflightError: pandas is not installed.
        """
        import_or_refuse("pandas", f"Run.frame({table!r})")
        pandas: Any = import_module("pandas")  # it brings no types
        found: Any = {"metrics": self._files.metrics, "evaluations": self._files.evaluations}.get(table, self.samples)
        return pandas.DataFrame(found)

    def plot(self, *names: str) -> Figure:
        """Draw metrics and evaluations over the steps, one curve below the other; a notebook shows the figure.

        Args:
            names: metrics or `eval/...`; without any reward or loss, the held-out score, entropy and gradient norm.

        Raises:
            OptionsError: the run has no numbers of this name.
            PreflightError: matplotlib is not installed.
        """
        import_or_refuse("matplotlib", "Run.plot()")
        from matplotlib.figure import Figure  # not pyplot, which keeps every figure of the process

        curves = {name: points for name in names or _CURVES if (points := self._points(name)) or names}
        missing = [name for name, points in curves.items() if not points]
        if missing or not curves:
            raise self._nothing_to_draw(missing, [name for name in curves if name not in missing])
        width, height = _PANEL
        figure: Any = Figure(figsize=(width, height * len(curves)), layout="constrained")
        panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)
        for panel, (name, points) in zip(panels[:, 0], curves.items(), strict=True):
            # evaluations are few, and lie apart
            panel.plot(*zip(*points, strict=True), marker="o" if name.startswith("eval") else "", linewidth=1.2)
            panel.set_ylabel(name)
            panel.grid(visible=True, alpha=0.3)
        panels[-1, 0].set_xlabel("step")
        figure.suptitle(self.name)
        return figure

    def model(self, step: int | None = None) -> Any:
        """Load the model of a checkpoint as transformers has it, in eval mode, adapters folded in.

        Args:
            step: of the checkpoint; None = the newest that verifies.

        Raises:
            CheckpointError: there is none, or it does not verify.
        """
        from rft_models.loading.transformers_loading import plain_model

        with TemporaryDirectory(prefix="rft-model-") as folder:
            return plain_model(self.export(Path(folder) / "model", step))

    def tokenizer(self) -> Any:
        """Load the tokenizer of the newest checkpoint as transformers has it.

        Raises:
            CheckpointError: there is no checkpoint that verifies.
        """
        from rft_dist.checkpoints.locate import resolve_checkpoint
        from rft_models.loading.transformers_loading import plain_tokenizer

        return plain_tokenizer(resolve_checkpoint(self.path, asked_by="Run.tokenizer()").checkpoint.model_directory)

    def export(self, directory: str | Path, step: int | None = None) -> Path:
        """Write the model of a checkpoint as a Hugging Face directory, as `rft-train export` does; return its path.

        Raises:
            CheckpointError: there is none, or it does not verify.
            OptionsError: the run has no checkpoint of this step.
        """
        from rft.checkpoints.export import export

        target = Path(directory).expanduser()
        export(self._checkpoint(step), target)
        return target

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {self.outcome} at step {self.step}"

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, with what is called in the place of a method of another trainer."""
        instead = f"; use {_ELSEWHERE[name].format(name=self.__dict__.get('path', ''))}" if name in _ELSEWHERE else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    @property
    def _files(self) -> RunFiles:
        return read_run(self.path)

    def _points(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric or an evaluation, where it is a number."""
        table = self._files.evaluations if name.startswith(("eval/", "eval_ema/")) else self._files.metrics
        pairs = ((row.get("step"), row.get(name)) for row in table)
        return [(step, value) for step, value in pairs if is_number(step) and is_number(value)]

    def _nothing_to_draw(self, missing: list[str], there: list[str]) -> OptionsError:
        known = [name for name in (*self.metrics, *self.evaluations) if self._points(name)]
        near = nearest_names(missing[0], known) if missing else []
        return OptionsError(
            code="run.no_curve",
            what=f"{self.path} has no numbers of {', '.join(missing)}" if missing else f"{self.path} has no steps yet",
            where="Run.plot",
            why=f"the nearest are {', '.join(near)}" if near else f"it has {', '.join(known) or 'no metric'}",
            state="nothing was changed",
            do=f"run.plot({(near or there or known)[0]!r})" if known else "plot it again after its first step",
        )

    def _checkpoint(self, step: int | None) -> Path:
        if step is None:
            return self.path
        found = {int(name.removeprefix("step_")): name for name in self._files.checkpoints}
        if step in found:
            places = {path.name: path for path in step_directories(self.path / "checkpoints")}
            return places.get(found[step], self.path / "checkpoints" / found[step])
        raise OptionsError(
            code="run.no_such_checkpoint",
            what=f"{self.path} has no checkpoint of step {step}",
            where="step",
            why=f"there are checkpoints of the steps {', '.join(map(str, found))}" if found else "it has no checkpoint",
            state="nothing was changed",
            do=f"step={min(found, key=lambda other: abs(other - step))}"
            if found
            else "run.resume() trains until it saves",
        )


def import_or_refuse(package: str, asked_by: str) -> None:
    """Refuse what needs a package that is not installed.

    Raises:
        PreflightError: it is not.
    """
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise PreflightError(
            code="library.no_package",
            what=f"{package} is not installed",
            where=asked_by,
            why="training does not need it, so it is no dependency of rft",
            state="nothing was changed",
            do=f"uv pip install {package}",
        )


def _no_run(path: Path) -> DataError:
    parent = path.absolute().parent
    runs = sorted(entry.name for entry in parent.iterdir() if is_run(entry)) if parent.is_dir() else []
    # a checkpoint of a run, or its model
    around = next((folder for folder in list(path.absolute().parents)[:3] if is_run(folder)), None)
    near = [around] if around else [parent / name for name in nearest_names(path.name, runs, count=1) or runs[:1]]
    return DataError(
        code="run.none",
        what=f"no run at {path}" if path.exists() else f"{path} does not exist",
        where=str(path),
        why="a run directory has a config.yaml; "
        + (f"it is part of the run {around}" if around else f"{parent} has {', '.join(runs[:5]) or 'no run'}"),
        state="nothing was changed",
        do=f"rft.Run({str(near[0])!r})" if near else "rft.Run with the directory that save_path has named",
    )
