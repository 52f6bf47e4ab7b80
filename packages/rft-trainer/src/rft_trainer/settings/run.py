"""Seed, run directory, saving, logging and stopping. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TokenRecords = Literal["shown", "all", "off"]
OnAlarm = Literal["log", "pause", "stop"]

TENSORBOARD_IN_RUN = "run"
"""The value of `use_tensorboard` that stands for a folder of the run's own directory."""
PROFILED_STEPS = "3-5"
"""The steps of a bare `profile`: the first two make what later ones take."""


@dataclass(frozen=True, kw_only=True)
class SeedSettings:
    """The random seed, and detailed reports for debugging."""

    seed: int = field(default=42, metadata={"minimum": 0})
    """Seed of every random choice: the same seed gives the same run."""

    debug: bool = False
    """Report collectives, kernels and native crashes in detail (slower)."""


@dataclass(frozen=True, kw_only=True)
class RunSettings(SeedSettings):
    """The name of a run, its reports and trackers."""

    run_name: str = ""
    """Name of the run; empty = <recipe>-<date>-<word>."""

    log_interval: int = field(default=1, metadata={"minimum": 1})
    """Steps between printed progress lines."""

    max_refused_steps: int = field(default=3, metadata={"minimum": 0})
    """Number of consecutive updates that may be skipped for non-finite gradients before the run stops."""

    max_rows_set_aside: int = field(default=16, metadata={"minimum": 0})
    """Number of rows that a run may leave out because their loss or gradient is not finite; the step is taken without
    them. Beyond it see `max_rollbacks`; 0 = the whole step is skipped (see `max_refused_steps`)."""

    max_rollbacks: int = field(default=2, metadata={"minimum": 0})
    """Number of times that a run may go back to its last checkpoint and leave out from there the rows that exceed
    `max_rows_set_aside`; after that, or where the same step fails again, it stops. 0 = it stops at once."""

    max_norm_spike: float = field(default=0.0, metadata={"minimum": 0.0})
    """Gradient norm, in medians of the last 64 applied updates, above which an update is treated like one that is not
    finite; 0 = norms are only clipped."""

    weight_check_steps: int = field(default=0, metadata={"minimum": 0})
    """Steps between comparisons of the checksums of weights and optimizer state, over ranks and with the end of the
    step before; 0 = none."""

    profile: str = field(default="", metadata={"bare": PROFILED_STEPS})
    """Steps of which rank 0 records every operation, such as 5 or 10-12: profile/ in the run's directory then holds a
    trace and a page on what takes the time; these steps are slower, and no result changes. Bare = 3-5; empty = none."""

    on_alarm: OnAlarm = "log"
    """Answer to an alarm of the run's health, the first time that it becomes true: log = a line in the log; pause =
    save and end with exit code 75, which asks to be started again; stop = save and end with exit code 10. A resume goes
    on past it."""

    use_wandb: str = field(default="", metadata={"bare": "rft"})
    """Project of Weights & Biases to report to; bare = rft; empty = none. The key is read from WANDB_API_KEY."""

    wandb_org: str = ""
    """Team or user of Weights & Biases that owns the project."""

    wandb_group: str = ""
    """Group of runs of Weights & Biases."""

    wandb_run_name: str = ""
    """Name of the run at Weights & Biases; empty = the run's own."""

    use_tensorboard: str = field(default="", metadata={"bare": TENSORBOARD_IN_RUN})
    """Directory of TensorBoard event files, a folder for each run; bare or `run` = tensorboard in the run's directory;
    empty = none."""

    use_trackio: str = field(default="", metadata={"bare": "rft"})
    """Project of trackio to report to; bare = rft; empty = none."""

    use_mlflow: str = field(default="", metadata={"bare": "rft"})
    """Experiment of MLflow to report to, on the server of MLFLOW_TRACKING_URI or in the run's directory; bare = rft;
    empty = none."""


@dataclass(frozen=True, kw_only=True)
class RlRunSettings(RunSettings):
    """The name of a run, its reports and trackers, and the limit on failed rewards."""

    save_trajectories: bool = True
    """Write prompts, responses and rewards to rollouts/step_N.jsonl."""

    num_trajectories_to_save: int = field(default=10, metadata={"minimum": 1})
    """Number of responses written per file (with `save_trajectories`)."""

    rollout_log_interval: int = field(default=10, metadata={"minimum": 1})
    """Steps between two of these files, beside that of the first step (with `save_trajectories`)."""

    token_records: TokenRecords = "shown"
    """Write rollouts/tokens_N.arrow, with log-probs of engine and trainer, entropy, advantage and weight version of
    each token, which takes a forward pass of these responses: shown = of those that are written as text; all = of
    every response of every step; off = none."""

    token_records_mib: float = field(default=256.0, metadata={"minimum": 0.0})
    """MiB of such files that a run keeps; beyond it the oldest are removed, but never the newest."""

    max_unscored_share: float = field(default=0.1, metadata={"minimum": 0.0, "maximum": 1.0})
    """Fraction of a step's rewards that may fail before the run stops."""


@dataclass(frozen=True, kw_only=True)
class OutputSettings(SeedSettings):
    """The output file of a command that trains nothing."""

    output: str = ""
    """File for one JSON line per completion; empty = only the summary is printed."""
