"""The schedule of evaluations, and the responses to held-out prompts. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field

from rft_core.errors import SettingsRefusal


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The schedule of evaluations on the held-out rows."""

    eval_steps: int = field(default=-1, metadata={"minimum": -1})
    """Steps between evaluations, in addition to those at the start and the end; -1 = once an episode (epoch); 0 = at
    the start and the end alone."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSampleSettings:
    """The number of responses to each held-out prompt."""

    eval_n: int = field(default=1, metadata={"minimum": 1, "aliases": ("eval_n_samples_per_prompt",)})
    """Responses sampled for each held-out prompt; from 2 on accuracy and reward are means over them, and pass@k, maj@k
    and best@k are reported too. --eval_n_samples_per_prompt is the same flag."""

    eval_k: str = ""
    """Values of k of pass@k, maj@k and best@k, joined by commas, each at most `eval_n`; empty = 1, 2, 4, ... and
    `eval_n`. Of beams they are those of hit@k."""

    eval_pick: str = ""
    """Part of the reward, such as a reward model's name, whose highest value picks one of k responses: picked@k is the
    accuracy of the pick; reward = the whole reward; empty = no such measure."""


@dataclass(frozen=True, kw_only=True)
class RlEvaluationSettings(EvaluationSampleSettings, EvaluationSettings):
    """The schedule of evaluations on the held-out rows, and how their prompts are answered."""

    eval_temperature: float = field(default=0.0, metadata={"minimum": 0.0})
    """Temperature of the responses to held-out prompts; 0 = greedy."""

    eval_beams: int = field(default=0, metadata={"minimum": 0})
    """Best sequences of the constraint that are searched for after each held-out prompt, in place of a draw: the first
    is the answer, and hit@k says whether one of the first k is right, for the values of `eval_k`; 0 = the answer is
    drawn."""

    keep_best: bool = False
    """Save at every evaluation with a higher held-out reward than all before, and keep that checkpoint beyond
    `max_ckpt_num` and `max_ckpt_mem` until there is a better one."""


def parse_ks(eval_k: str, eval_n: int, name: str = "eval_n") -> tuple[int, ...] | None:
    """Return the values of k that `eval_k` names, in ascending order; None where it is empty; `name` sets `eval_n`.

    Raises:
        ValueError: something else than whole numbers from 1 to `eval_n`.
    """
    if not eval_k.strip():
        return None
    try:
        ks = sorted({int(part) for part in eval_k.split(",")})
    except ValueError:
        raise ValueError("they are whole numbers, joined by commas") from None
    if ks[0] < 1 or ks[-1] > eval_n:
        raise ValueError(f"a draw of k holds at least one of the {eval_n} responses ({name}) and at most all")
    return tuple(ks)


def draws_refusal(number: int, eval_k: str, name: str = "eval_n") -> SettingsRefusal | None:
    """Return the refusal of values of k that are none, or more than the responses, whose number `name` sets."""
    try:
        parse_ks(eval_k, number, name)
    except ValueError as error:
        ks = [int(part) for part in eval_k.split(",") if part.strip().isdigit() and int(part) > 0]
        do = f"--{name} {max(ks)}" if ks and max(ks) > number else f"--eval_k {number}"
        return SettingsRefusal(code="eval.draws", names=("eval_k", name), why=str(error), do=do)
    return None


def pick_refusal(eval_n: int, eval_pick: str) -> SettingsRefusal | None:
    """Return the refusal of a pick among one response."""
    if not eval_pick or eval_n > 1:
        return None
    why = "of one response nothing is picked"
    return SettingsRefusal(code="eval.pick", names=("eval_pick", "eval_n"), why=why, do="--eval_n 8")


def equal_samples_refusal(eval_n: int, temperature: float, *, flag: str) -> SettingsRefusal | None:
    """Return the refusal of several responses that are all the same; `flag` is the command's temperature."""
    if eval_n == 1 or temperature > 0:
        return None
    return SettingsRefusal(
        code="eval.equal_samples",
        names=("eval_n", flag),
        why="at temperature 0 nothing is drawn, so all responses to a prompt are the same",
        do=f"--{flag} 1",
    )
