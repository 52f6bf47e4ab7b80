"""A task of another package as one record: its rows, what scores responses and evaluations, what responses may be.

A package names its record by an entry point of the group `rft.tasks`, whose name is that of the task:

    [project.entry-points."rft.tasks"]
    sums = "my_package.tasks:SUMS"

`--prompt_data sums:100` and `--eval_data sums:20` take its rows, with what stands behind the colon as their argument;
`--reward sums` takes its reward, `--constraint sums` draws responses among its sequences, `--eval_metrics sums` adds
its metrics to every evaluation. A record names functions as texts, "module:function", which are imported when they
are called, so that pages need none of what they import.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledTask:
    """Rows, reward, constraint and evaluation that a package adds; a part that it has not is empty."""

    name: str
    rows: str = ""
    """`(argument: str) -> rows`: mappings with the columns that `--input_key` and the other keys name. The same
    argument must give the same rows, or no run on them can be continued."""
    reward: str = ""
    """`(responses, labels, *, extras) -> one number a response`, as the function of a `--reward file.py:function`."""

    constraint: str = ""
    """`(tokenizer, argument: str) -> sequences`: the token ids of every response that may be drawn, with
    `tokenizer.encode(text)` and, at the end of each, one of `tokenizer.eos_ids`."""

    evaluation: str = ""
    """`(responses, labels, rewards) -> {name: number}`: metrics of the held-out answers, one answer a prompt in their
    order; a reward is None where an answer has none. They are `eval/NAME` in evals.jsonl."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that it has."""
        return tuple(part for part in ("rows", "reward", "constraint", "evaluation") if getattr(self, part))
