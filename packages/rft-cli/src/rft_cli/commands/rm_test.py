"""`rft-train rm-test`: how often a reward model prefers the better response, and whether its scores are sound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rft.process.machine import open_machine
from rft.settings import RmTestSettings
from rft.stages.rm_test import RmTest, rm_test
from rft.stages.supervised.step_test import StepTest
from rft_cli.config.resolve import resolve
from rft_core.durable_files import storage_errors
from rft_core.terminal_text import visible


def run(argv: Sequence[str]) -> int:
    """Score the pairs; print the figures, the last line as JSON."""
    settings: RmTestSettings = resolve("rm-test", argv).settings
    with open_machine(settings.model.device) as machine:
        test = rm_test(settings, machine)
    _show(settings, test)
    if settings.output.output:
        with storage_errors("write", Path(settings.output.output)):
            Path(settings.output.output).write_text("".join(json.dumps(row) + "\n" for row in test.rows()))
    return 0


def _show(settings: RmTestSettings, test: RmTest) -> None:
    if test.steps is not None:
        _show_steps(settings.model.pretrain, test.steps)
        return
    assert test.report is not None, "pairs have a report"
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


def _show_steps(model: str, test: StepTest) -> None:
    evaluation = test.evaluation
    figures = evaluation.as_record()
    print(visible(f"model     {model}: the steps of {len(test.rows)} responses"))
    if "eval/accuracy" in figures:
        print(
            f"calls     {figures['eval/accuracy']:.1%} of {figures['eval/n']} labelled steps what they are (95 %: "
            f"{figures['eval/accuracy_low']:.3f} to {figures['eval/accuracy_high']:.3f}); all alike would be "
            f"{figures['eval/majority']:.1%}"
        )
    print(
        f"finds     the first error, or that there is none, in {figures['eval/first_error']:.1%} of the responses "
        f"(95 %: {figures['eval/first_error_low']:.3f} to {figures['eval/first_error_high']:.3f})"
    )
    for one in evaluation.calibration():
        print(
            f"sure      {one.low:.0%} to {one.high:.0%}: predicted {one.predicted:.3f}, good {one.observed:.3f}, "
            f"{one.num} steps"
        )
    print(json.dumps({name.removeprefix("eval/"): value for name, value in figures.items()}))
