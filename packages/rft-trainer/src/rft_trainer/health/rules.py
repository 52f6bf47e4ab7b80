"""Rules of the detectors: whether something is true of the last rows of a run, and with which value.

A rule is a pure function of rows, a window in steps and a threshold. A row that lacks its metric, or fewer rows than
the window, make it silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from rft_trainer.health.history import FIRST, LAST, History, Row, number, numbers
from rft_trainer.metrics.memory_growth import fifths, rate, steady_growth
from rft_trainer.runs import bottleneck
from rft_trainer.runs.verdict import RunFinding, collapse, rising_loss

NEAR = 0.02
"""Share of the range of rewards within which a mean counts as its end."""

LONGER = 1.25
"""Growth of the mean response, as a factor, that accounts for memory that grows with it."""

FLOAT32_STEP = 1e-9
"""Learning rate below which a step of Adam is less than half a bit of a usual weight of 0.02 in float32; in bfloat16
that is already so below 4e-5."""

WAIT_SECONDS = 0.1
"""Seconds a step that ranks wait for another one, below which nothing is said of it."""


@dataclass(frozen=True, slots=True)
class RuleResult:
    """Value that a rule found, with what it says of it."""

    value: float
    detail: str = ""
    """A part of the sentence that is no number."""
    do: str = ""
    """A remedy computed from the rows; empty = the detector's own."""


_LAYER_ENTROPY = "router/entropy_layer_"

Rule = Callable[[History, int, float], RuleResult | None]


def above(name: str) -> Rule:
    """Return the rule that a metric is above the threshold in every step of the window; its value is the mean."""

    def rule(history: History, window: int, threshold: float) -> RuleResult | None:
        values = history.series(name, window)
        return RuleResult(fmean(values)) if values and min(values) > threshold else None

    return rule


def below(name: str) -> Rule:
    """Return the rule that a metric is below the threshold in every step of the window; its value is the mean."""

    def rule(history: History, window: int, threshold: float) -> RuleResult | None:
        values = history.series(name, window)
        return RuleResult(fmean(values)) if values and max(values) < threshold else None

    return rule


def finding(*codes: str) -> Rule:
    """Return the rule of the verdict's findings with these codes, on the last rows."""

    def rule(history: History, window: int, threshold: float) -> RuleResult | None:
        del window
        return next((_of(found, threshold) for found in history.findings() if found.code in codes), None)

    return rule


def _of(found: RunFinding | None, value: float = 0.0) -> RuleResult | None:
    return None if found is None else RuleResult(value, found.what, found.do)


# rewards


def flat_groups(history: History, window: int, threshold: float) -> RuleResult | None:
    """Hardly any group has rewards that differ, on average over the window, and some have; not where all are right."""
    signal = history.series("reward/groups_with_signal", window)
    if not signal or not 0 < fmean(signal) < threshold or _rewards_at(history, window) == "highest":
        return None
    return RuleResult(fmean(signal))


def reward_saturated(history: History, window: int, threshold: float) -> RuleResult | None:
    """Every mean of the window is at the highest reward of the rows, of those that have worse ones."""
    if _rewards_at(history, window) != "highest":
        return None
    value = fmean(history.series("reward/mean", window))
    return RuleResult(value) if value > threshold else None


def reward_zero(history: History, window: int, threshold: float) -> RuleResult | None:
    """Every mean of the window is at the lowest reward of the rows, of those that have better ones."""
    del threshold
    if _rewards_at(history, window) != "lowest":
        return None
    return RuleResult(fmean(history.series("reward/mean", window)))


def _rewards_at(history: History, window: int) -> str:
    """Return the end of the range of rewards at which all means of the window are; empty where they are at none."""
    means = history.series("reward/mean", window)
    if not means:
        return ""
    rows = history.known()
    lowest, highest = min(numbers(rows, "reward/min"), default=0.0), max(numbers(rows, "reward/max"), default=0.0)
    width = NEAR * (highest - lowest)
    if width <= 0:
        return ""
    if min(means) >= highest - width:
        return "highest"
    return "lowest" if max(means) <= lowest + width else ""


def reward_fell(history: History, window: int, threshold: float) -> RuleResult | None:
    """The verdict's collapse: rewards that were good end near the lowest, by more than chance."""
    del threshold
    means = history.series("reward/mean", window)
    return _of(collapse(history.known()), means[-1]) if means else None


def reward_errors(history: History, window: int, threshold: float) -> RuleResult | None:
    """Responses without a reward, on average over the window; the metric is absent from a step without any."""
    if number(history.row, "reward/unscored") is None:
        return None
    rows = history.recent(window)
    share = sum(numbers(rows, "reward/unscored")) / window
    return RuleResult(share) if rows and share > threshold else None


def advantage_sign(history: History, window: int, threshold: float) -> RuleResult | None:
    """Return the correlation of advantage and reward, where it is below the threshold in every step of the window."""
    return below("policy/advantage_agreement")(history, window, threshold)


def held_out_gap(history: History, window: int, threshold: float) -> RuleResult | None:
    """Rewards of training rows are above those of held-out rows by a share of the range of rewards.

    Only of an evaluation that came just before, since both move.
    """
    evaluated, held_out = number(history.evaluation, "step"), number(history.evaluation, "eval/reward")
    means = history.series("reward/mean", window)
    if evaluated is None or held_out is None or not means or evaluated < window:
        return None
    if history.row["step"] != evaluated + 1:
        return None
    rows = history.known()
    width = max(numbers(rows, "reward/max"), default=0.0) - min(numbers(rows, "reward/min"), default=0.0)
    gap = fmean(means) - held_out
    if width <= 0 or gap <= threshold * width:
        return None
    return RuleResult(gap, f"{fmean(means):.3g} in training, {held_out:.3g} on held-out rows")


# responses and data


def length_drift(history: History, window: int, threshold: float) -> RuleResult | None:
    """Responses are longer or shorter than those of the first steps, by this factor and by 8 tokens at least."""
    lengths, first = (
        history.series("completion/length_mean", window),
        history.beginning("completion/length_mean", window),
    )
    if not lengths or len(first) < window or history.row["step"] <= FIRST:
        return None
    begin, now = max(fmean(first), 1e-9), fmean(lengths)
    if abs(now - begin) < 8 or 1 / threshold < now / begin < threshold:
        return None
    return RuleResult(now / begin, f"{begin:.4g} -> {now:.4g} tokens")


def repeated_batch(history: History, window: int, threshold: float) -> RuleResult | None:
    """The prompts of the steps are one and the same batch within an episode, or at most this share of them differ."""
    rows = history.recent(window)
    if not rows or number(history.row, "data/distinct_prompts") is None:
        return None
    batches = {(row.get("data/checksum"), row.get("data/epoch")) for row in rows}
    if len(batches) == 1 and None not in next(iter(batches)):
        return RuleResult(1.0, f"the prompts of {window} steps were the same batch")
    shares = [
        distinct / prompts
        for row in rows
        if (distinct := number(row, "data/distinct_prompts")) and (prompts := number(row, "data/prompts"))
    ]
    if len(shares) < window or max(shares) > threshold:
        return None
    return RuleResult(fmean(shares), f"{fmean(shares):.0%} of the prompts of a step were different ones")


def wrong_mask(history: History, window: int, threshold: float) -> RuleResult | None:
    """Trained tokens are fewer or more than sampled ones, by more than the threshold as a share."""
    shares = history.series("data/trained_share", window)
    if not shares or min(abs(share - 1.0) for share in shares) <= threshold:
        return None
    return RuleResult(fmean(shares))


# the update


def entropy_collapse(history: History, window: int, threshold: float) -> RuleResult | None:
    """The entropy is below a share of its beginning, and the rewards are not at their highest."""
    values, first = history.series("policy/entropy", window), history.beginning("policy/entropy", window)
    if not values or len(first) < window or history.row["step"] <= 2 * window:
        return None
    means = history.series("reward/mean", window)
    highest = max(numbers(history.known(), "reward/max"), default=0.0)
    lowest = min(numbers(history.known(), "reward/min"), default=0.0)
    if means and fmean(means) >= lowest + 0.9 * (highest - lowest):
        return None  # it has settled on the right answers
    share = fmean(values) / max(fmean(first), 1e-9)
    return RuleResult(share, f"{fmean(first):.3g} -> {fmean(values):.3g} nats") if share < threshold else None


def gradient_spike(history: History, window: int, threshold: float) -> RuleResult | None:
    """The gradient norm is above this many medians of the norms before it."""
    norm = number(history.row, "policy/gradient_norm")
    if not norm:
        return None
    before = _norms(history, window)[:-1]
    if len(before) < 8 or norm <= threshold * median(before):
        return None
    rows = history.row.get("policy/largest_rows")
    which = f"; the largest gradients are those of {rows}" if rows else ""
    usual = median(before)
    times = f"{_plain(norm / usual)} times the median {_plain(usual)} of the steps before"
    return RuleResult(norm, f"{_plain(norm)}, {times}{which}")


def _plain(value: float) -> str:
    """Return a number with three digits; one of thousands whole, with commas, and not as a power of ten."""
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.3g}"


def gradient_exploding(history: History, window: int, threshold: float) -> RuleResult | None:
    """The median of the window's gradient norms is above this many medians of the first ones."""
    norms, first = history.series("policy/gradient_norm", window), _first_norms(history)
    if not norms or not first or history.row["step"] <= FIRST or median(norms) <= threshold * median(first):
        return None
    return RuleResult(median(norms), f"{median(first):.3g} -> {median(norms):.3g}")


def gradient_small(history: History, window: int, threshold: float) -> RuleResult | None:
    """Gradient norms above 0, every one below a share of the first ones; not at the highest reward."""
    norms, first = history.series("policy/gradient_norm", window), _first_norms(history)
    if not norms or not first or history.row["step"] <= FIRST or min(norms) <= 0:
        return None
    if max(norms) >= threshold * median(first) or _rewards_at(history, window) == "highest":
        return None
    return RuleResult(median(norms), f"{median(first):.3g} -> {median(norms):.3g}")


def _norms(history: History, window: int) -> list[float]:
    # a step without signal has a gradient of 0, which says nothing about the size of the others
    return [norm for norm in numbers(history.known()[-window:], "policy/gradient_norm") if norm > 0]


def _first_norms(history: History) -> list[float]:
    norms = [norm for norm in history.beginning("policy/gradient_norm", FIRST) if norm > 0]
    return norms if len(norms) >= FIRST // 2 else []


def loss_not_finite(history: History, window: int, threshold: float) -> RuleResult | None:
    """A loss of the last row is no finite number; of `sft/loss` the verdict says it."""
    found = finding("loss_not_finite")(history, window, threshold)
    if found is not None:
        return found
    row = history.row
    for name in ("sft/loss", "policy/loss", "dpo/loss", "rm/loss", "critic/loss"):
        if name in row and number(row, name) is None:
            return RuleResult(0.0, f"{name} was not a finite number in step {row['step']}")
    return None


def loss_rose(history: History, window: int, threshold: float) -> RuleResult | None:
    """The verdict's loss that rose, on the rows that are kept."""
    del threshold
    losses = history.series("sft/loss", window)
    return _of(rising_loss(history.known()), losses[-1]) if losses else None


def no_rate(history: History, window: int, threshold: float) -> RuleResult | None:
    """The learning rate is not above the threshold in any step of the window, and updates were applied."""
    rates, updates = history.series("policy/learning_rate", window), history.series("policy/updates", window)
    return RuleResult(max(rates)) if rates and updates and max(rates) <= threshold and min(updates) > 0 else None


def frozen_weights(history: History, window: int, threshold: float) -> RuleResult | None:
    """Updates with a gradient and a learning rate were applied, and no weight changed by more than the threshold."""
    changes = history.series("policy/weight_change", window)
    if not changes or max(changes) > threshold:
        return None
    norms, rates = history.series("policy/gradient_norm", window), history.series("policy/learning_rate", window)
    if not norms or not rates or min(norms) <= 0 or min(rates) <= 0:
        return None
    if max(rates) < FLOAT32_STEP:
        flag = "actor_learning_rate" if history.command == "rl" or "reward/mean" in history.row else "learning_rate"
        return RuleResult(max(changes), do=f"--{flag} {1000 * max(rates):.3g}: a step of {max(rates):.3g} is lost")
    return RuleResult(max(changes))


def step_too_large(history: History, window: int, threshold: float) -> RuleResult | None:
    """Weights of a policy that rewards train change by more than this share of their size in every step.

    A model that is trained from nothing does so in its first steps, and rightly.
    """
    if "reward/mean" not in history.row:
        return None
    return above("policy/weight_change")(history, window, threshold)


def router_collapse(history: History, window: int, threshold: float) -> RuleResult | None:
    """The loads of the experts of one layer are uneven: their entropy is below a share of an even spread's throughout.

    Rows without the entropy of each layer have its mean, and the largest violation that tells the layer.
    """
    layers = {name: history.series(name, window) for name in history.row if name.startswith(_LAYER_ENTROPY)}
    uneven = {name: fmean(shares) for name, shares in layers.items() if shares and max(shares) < threshold}
    if uneven:
        worst = min(uneven, key=lambda name: uneven[name])
        return RuleResult(uneven[worst], f" of layer {worst.removeprefix(_LAYER_ENTROPY)}")
    shares = [] if layers else history.series("router/entropy", window)
    if not shares or max(shares) >= threshold:
        return None
    return RuleResult(fmean(shares), _most_violated(history.row))


def _most_violated(row: Row) -> str:
    """Say which layer has the largest violation; empty where a row has none."""
    prefix = "router/max_violation_layer_"
    layers = {name: number(row, name) or 0.0 for name in row if name.startswith(prefix)}
    return f"; the worst is layer {max(layers, key=lambda name: layers[name]).removeprefix(prefix)}" if layers else ""


# memory and time


def memory_slope(name: str, whose: str) -> Rule:
    """Return the rule that a use of the first rank's memory rises in all fifths of the window, by the threshold."""

    def rule(history: History, window: int, threshold: float) -> RuleResult | None:
        values = history.series(name, window)
        grown = steady_growth(values)
        if grown <= threshold:
            return None
        means, each = fifths(values), rate(grown, window)
        detail = f"{whose} rank 0 grows by {each:.3g} MiB a step: {means[0]:.0f} -> {means[-1]:.0f} MiB"
        return RuleResult(each, detail, _longer_responses(history, window))

    return rule


def memory_growth(kind: str, whose: str, steps: int = 0) -> Rule:
    """Return the rule that the memory of some rank rises in all fifths of the window, by the threshold (MiB) in all.

    The window is of `steps` steps where these are given, in place of the detector's.
    """

    def rule(history: History, window: int, threshold: float) -> RuleResult | None:
        row, window = history.row, steps or window
        grown, rank = number(row, f"memory/{kind}_mib"), number(row, f"memory/{kind}_rank")
        if grown is None or rank is None or grown <= threshold:
            return None
        each = rate(grown, window)
        detail = (
            f"{whose} rank {rank:.0f} grows by {each:.3g} MiB a step: by {grown:.0f} MiB in the last {window} steps"
        )
        return RuleResult(each, detail + _steps_left(row, kind), _longer_responses(history, min(window, LAST)))

    return rule


def either(first: Rule, second: Rule) -> Rule:
    """Return the rule that one of two is true; the first one speaks where both are."""

    def rule(history: History, window: int, threshold: float) -> RuleResult | None:
        return first(history, window, threshold) or second(history, window, threshold)

    return rule


def _steps_left(row: Row, kind: str) -> str:
    """Say when the memory that is free now would be used up, and whether the run ends before; empty if not known."""
    left = number(row, f"memory/{kind}_steps_left")
    if left is None:
        return ""
    said = f"; what is free now would be used up in about {float(f'{left:.2g}'):,.0f} steps"
    total = number(row, "num_steps")
    to_go = None if total is None else total - row["step"]
    return said if to_go is None or left < to_go else f"{said}, and {to_go:,.0f} are left to train"


def _longer_responses(history: History, window: int) -> str:
    """Return the remedy where the responses have grown with the memory; empty where they have not."""
    lengths = fifths(history.series("completion/length_mean", window))
    if not lengths or lengths[-1] < LONGER * max(lengths[0], 1.0):
        return ""
    return (
        f"a smaller --generate_max_len: the responses have grown with it, from {lengths[0]:.4g} to {lengths[-1]:.4g} "
        "tokens, and longer ones take more memory"
    )


def data_wait(history: History, window: int, threshold: float) -> RuleResult | None:
    """The verdict on the speed of the last rows: they wait for their data."""
    share = number(history.row, "time/share_data")
    if share is None or share <= threshold / 2:
        return None
    bound = bottleneck.speed_verdict(history.recent(window), history.command)
    return _of(bound, share) if bound is not None and bound.code == "data_bound" else None


def generation_tail(history: History, window: int, threshold: float) -> RuleResult | None:
    """The engine waits for its last responses in more than this share of the steps of the window."""
    rows = history.recent(window)
    if history.row.get("time/engine_limit") != "tail" or not rows:
        return None
    share = sum(row.get("time/engine_limit") == "tail" for row in rows) / window
    return RuleResult(share) if share > threshold else None


def straggler(history: History, window: int, threshold: float) -> RuleResult | None:
    """One and the same rank worked longest in every step of the window, by the threshold over the median rank.

    Not where the others wait less than a tenth of a second a step for it: first ranks write the files of a run.
    """
    slowest, ratios = history.series("time/slowest_rank", window), history.series("time/slowest_rank_ratio", window)
    seconds = history.series("time/step", window)
    if not slowest or not ratios or not seconds or len(set(slowest)) > 1 or min(ratios) <= threshold:
        return None
    ratio = median(ratios)
    waits = median(seconds) * (1 - 1 / ratio)
    if waits < WAIT_SECONDS:
        return None
    who = f"rank {slowest[0]:.0f} worked {ratio:.2g} times as long as the median rank"
    return RuleResult(ratio, f"{who}: {waits:.2g} s")


def slower(history: History, window: int, threshold: float) -> RuleResult | None:
    """Tokens a second of the last 5 steps are below a share of those before, evaluations and saves apart."""
    rows = history.recent(window)
    if not rows or number(history.row, "time/tokens_per_second") is None:
        return None
    rates = [rate for row in rows if (rate := _rate(row)) is not None]
    if len(rates) < window:
        return None
    now, before = median(rates[-5:]), median(rates[:-5])
    if before <= 0 or now >= threshold * before:
        return None
    grown = bottleneck.grown_phase(rows[:-5], rows[-5:], history.command)
    which = "" if grown is None else f"; {grown.what}"
    return RuleResult(
        now / before, f"{before:,.0f} -> {now:,.0f} tokens a second{which}", "" if grown is None else grown.do
    )


def _rate(row: Row) -> float | None:
    """Return tokens a second of a step without its evaluation and its checkpoint; None where it is not known."""
    rate, seconds = number(row, "time/tokens_per_second"), number(row, "time/step")
    if rate is None or not seconds:
        return None
    apart = sum(number(row, f"time/{name}") or 0.0 for name in ("eval", "save"))
    return rate * seconds / (seconds - apart) if seconds > apart else None
