"""`rft-train rm-test`: how often a reward model prefers the better response, and whether its scores are sound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rft.config.trained_model import newest_model
from rft.process.machine import open_machine
from rft.resolved import with_values
from rft.settings import RmTestSettings
from rft.stages.rm_test import RmTest, rm_test
from rft_cli.config.resolve import resolve
from rft_core.durable_files import storage_errors
from rft_core.terminal_text import visible


def run(argv: Sequence[str]) -> int:
    """Score the pairs; print the figures, the last line as JSON."""
    settings: RmTestSettings = resolve("rm-test", argv).settings
    # a run stands for the model of its newest checkpoint
    directories = {"pretrain": settings.model.pretrain, "agree_with": settings.compared.agree_with}
    settings = with_values(settings, {name: newest_model(path) for name, path in directories.items()})
    with open_machine(settings.model.device) as machine:
        test = rm_test(settings, machine)
    _show(settings, test)
    if settings.output.output:
        with storage_errors("write", Path(settings.output.output)):
            Path(settings.output.output).write_text("".join(json.dumps(row) + "\n" for row in test.rows()))
    return 0


def _show(settings: RmTestSettings, test: RmTest) -> None:
    report, figures = test.report, dict(test.report.figures)
    print(visible(f"model     {settings.model.pretrain}: {', '.join(report.heads)} on the {report.pooling} state"))
    bounds = report.right_interval
    print(
        f"prefers   the better response in {report.num_right} of {report.num_decided} pairs "
        f"(95 %: {bounds.low:.3f} to {bounds.high:.3f}), mean margin {figures['mean_margin']:.4f}"
    )
    for one in report.calibration:
        print(
            f"sure      {one.low:.0%} to {one.high:.0%}: predicted {one.predicted:.3f}, right {one.observed:.3f}, "
            f"{one.num} pairs"
        )
    print(f"scores    {figures['lowest']:.4f} to {figures['highest']:.4f}, the same twice")
    if test.agreement is not None and test.other is not None:
        share = test.agreement.interval
        print(
            visible(
                f"agrees    with {settings.compared.agree_with} on {test.agreement.num_same} of "
                f"{test.agreement.num_pairs} pairs (95 %: {share.low:.3f} to {share.high:.3f}), kappa "
                f"{test.agreement.kappa:.3f}; that one is right in {test.other.num_right} of {test.other.num_decided}"
            )
        )
        figures["agreement"] = share.estimate
    print(json.dumps(figures))
