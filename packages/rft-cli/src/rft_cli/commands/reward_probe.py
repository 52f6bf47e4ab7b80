"""Command line of the test of a reward model by itself, which `examples/test_reward_model.py` runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rft.reward_probe import ProbeReport, probe_reward_model
from rft_cli.commands import arguments
from rft_core.errors import OptionsError

USAGE = """usage: python examples/test_reward_model.py --model DIR [--pairs FILE]

Score pairs of responses with a reward model, and say how often it prefers the better one; whether scores are finite,
the same twice, the same alone as together, and different at all. FILE has JSON lines with prompt (text, or a list of
messages), chosen and rejected; without it a few sums are scored."""


def main(argv: Sequence[str]) -> int:
    """Print the figures, the last line as JSON.

    Raises:
        OptionsError: no model is named.
        DataError: a directory that is no reward model, or a row without its fields.
        PreflightError: scores that cannot be trained on.
    """
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0
    parsed = arguments.parse("test_reward_model", argv, most=0, options=("model", "pairs"))
    if "model" not in parsed.values:
        raise OptionsError(
            code="option.required",
            what="no reward model is named",
            where="--model",
            why="it is a directory with a sequence classifier, or a reward model written here",
            do="--model DIR",
        )
    pairs = Path(parsed.values["pairs"]) if "pairs" in parsed.values else None
    _show(parsed.values["model"], probe_reward_model(parsed.values["model"], pairs))
    return 0


def _show(directory: str, report: ProbeReport) -> None:
    figures, bounds = report.figures, report.right_interval
    print(f"model     {directory}: {', '.join(report.heads)} on the {report.pooling} state")
    print(
        f"prefers   the chosen response in {report.num_right} of {int(figures['pairs'])} pairs "
        f"(95 %: {bounds.low:.3f} to {bounds.high:.3f}), mean margin {figures['mean_margin']:.4f}"
    )
    print(f"scores    {figures['lowest']:.4f} to {figures['highest']:.4f}, the same twice")
    print(json.dumps(figures))
