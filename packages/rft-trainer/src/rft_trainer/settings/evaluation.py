"""The schedule of evaluations, and the responses to held-out prompts. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field

from rft_core.errors import SettingsRefusal


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The schedule of evaluations on the held-out rows."""

    eval_steps: int = field(default=-1, metadata={"minimum": -1})
    """Steps between evaluations, in addition to those at the start and the end; -1 = once an episode (epoch); 0 =
    never."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSampleSettings:
    """The number of responses to each held-out prompt."""

    eval_n: int = field(default=1, metadata={"minimum": 1, "aliases": ("eval_n_samples_per_prompt",)})
    """Responses sampled for each held-out prompt; from 2 on accuracy and reward are means over them, and pass@k and
    best@k are reported too. --eval_n_samples_per_prompt is the same flag."""


@dataclass(frozen=True, kw_only=True)
class RlEvaluationSettings(EvaluationSampleSettings, EvaluationSettings):
    """The schedule of evaluations on the held-out rows, and how their prompts are answered."""

    eval_temperature: float = field(default=0.0, metadata={"minimum": 0.0})
    """Temperature of the responses to held-out prompts; 0 = greedy."""

    keep_best: bool = False
    """Save at every evaluation with a higher held-out reward than all before, and keep that checkpoint beyond
    `max_ckpt_num` and `max_ckpt_mem` until there is a better one."""


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
