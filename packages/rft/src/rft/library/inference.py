"""Evaluation and generation from Python: `rft.evaluate` and `rft.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rft.config.commands import EVAL, GENERATE
from rft.config.origins import KEYWORD, GivenSetting
from rft.library.given_model import model_place
from rft.library.given_rewards import GivenReward, chosen_reward
from rft.library.given_rows import Rows, rows_file
from rft.library.keyword_settings import resolved
from rft.library.named_arguments import evaluation_arguments, generation_arguments
from rft.library.python_errors import python_words
from rft.library.training_calls import Config, Model
from rft.resolved import Resolved
from rft_core.errors import OptionsError

if TYPE_CHECKING:
    from typing import Unpack

    from rft.library.keywords.inference_keywords import EvalKeywords, GenerateKeywords
    from rft_algos.statistics import Interval
    from rft_trainer.evaluation.comparison import PairedComparison


@dataclass(frozen=True, slots=True)
class EvaluationScores:
    """Scores of a model on held-out rows; rows without a reward are in no mean."""

    accuracy: float
    """Share of the scored rows whose answer is right; nan where none was scored."""
    reward: float
    """Mean reward of the scored rows."""
    accuracy_interval: tuple[float, float]
    """The 95 % interval of the accuracy (Wilson of single answers, Student over the prompts of several)."""
    reward_interval: tuple[float, float]
    """The 95 % interval of the mean reward."""
    metrics: dict[str, object]
    """What a row of evals.jsonl has, by name: `eval/accuracy`, `eval/n`, `eval/unscored`, ..."""
    rows: list[dict[str, Any]] = field(repr=False)
    """Prompt, response, label and reward of every response."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """The 95 % intervals by name: accuracy, reward, and of several responses pass@K, maj@K and best@K."""
    accuracy_by: dict[str, Interval] = field(default_factory=dict[str, Any])
    """Accuracy of the rows with each value of the column `eval_by`."""
    comparison: PairedComparison | None = None
    """This model (`after`) against `compare` (`before`), in pairs: differences, intervals, p-values, what changed."""


@evaluation_arguments
@python_words()
def evaluate(
    model: Model,
    data: Rows,
    reward: GivenReward | None = None,
    *,
    compare: Model | None = None,
    tokenizer: object | None = None,
    config: Config = (),
    **settings: Unpack[EvalKeywords],
) -> EvaluationScores:
    """Answer every row of `data` and score it, as `rft-train eval` does; every rank of several gets the result.

    Args:
        model: a directory, a name on the Hub, a `Run`, or a model of transformers.
        data: held-out rows, as objects, a path or a name on the Hub.
        reward: as `rft.rl` takes it.
        compare: another model, which answers the same rows under the same keys, or the file that an earlier
            evaluation of them wrote (`output`).
        tokenizer: of a model of transformers that was loaded from no directory.
        config: files of settings; keywords win over them.
        **settings: those of `rft-train eval` (docs/reference/eval.md).

    Raises:
        SettingsError: with every problem of the settings.
        ServiceError: no answer has a reward.
    """
    chosen = chosen_reward(reward)
    own = [_given("pretrain", model_place(model, tokenizer)), _given("eval_data", rows_file(data, "data"))]
    own += [_given("reward", chosen.setting)] if chosen.setting else []
    own += [_given("compare", model_place(compare))] if compare is not None else []
    prepared = resolved(EVAL.name, settings, config, own)
    _refuse_processes(prepared)
    from rft.process.machine import open_machine
    from rft.stages.evaluate import evaluate as scored

    with open_machine(prepared.settings.model.device) as machine:
        found = scored(prepared.settings, machine, reward=chosen.function)
        accuracy, mean = found.accuracy_interval, found.reward_interval
        return EvaluationScores(
            accuracy=found.result.accuracy,
            reward=found.result.mean_reward,
            accuracy_interval=(accuracy.low, accuracy.high),
            reward_interval=(mean.low, mean.high),
            metrics=found.result.as_record(),
            rows=found.flat_rows(),
            intervals={name: (one.low, one.high) for name, one in found.result.intervals().items()},
            accuracy_by=dict(found.accuracy_by),
            comparison=found.comparison,
        )


@generation_arguments
@python_words()
def generate(
    model: Model,
    prompts: str | Sequence[str] | Rows,
    *,
    tokenizer: object | None = None,
    config: Config = (),
    **settings: Unpack[GenerateKeywords],
) -> list[dict[str, Any]]:
    """Answer prompts, as `rft-train generate` does: a row a response, with "prompt", "response", "finish_reason".

    Args:
        model: a directory, a name on the Hub, a `Run`, or a model of transformers.
        prompts: a text, texts, rows with a column of prompts, or the `Path` of a file of rows.
        tokenizer: of a model of transformers that was loaded from no directory.
        config: files of settings; keywords win over them.
        **settings: those of `rft-train generate` (docs/reference/generate.md).

    Raises:
        SettingsError: with every problem of the settings.
        OptionsError: no prompts; a text that is the name of a file.
    """
    own = [
        _given("pretrain", model_place(model, tokenizer)),
        _given("prompt_data", _prompts_file(prompts, settings.get("input_key", "input"))),
    ]
    prepared = resolved(GENERATE.name, settings, config, own)
    from rft.process.machine import open_machine
    from rft.stages.answer_file import refuse_unwritable, write_answers
    from rft.stages.generate import generate as answered

    output = prepared.settings.output.output
    refuse_unwritable(output)
    with open_machine(prepared.settings.model.device) as machine:
        rows = answered(prepared.settings, machine)
        if output and machine.is_first:
            write_answers(output, rows)
        return rows


def _refuse_processes(prepared: Resolved[Any]) -> None:
    for name in ("nproc", "restarts"):
        # a file may be one of the command, which has processes of its own
        if prepared.values[name] and prepared.origins[name] == KEYWORD:
            raise OptionsError(
                code="library.processes",
                what=f"{name} = {prepared.values[name]}",
                where="keyword argument",
                why="a program scores in the processes that it runs in already; the command starts others",
                state="nothing was started",
                do=f"rft-train {prepared.command} --{name} {prepared.values[name]}",
            )


def _is_conversation(prompts: object) -> bool:
    turns = cast("list[object]", prompts) if isinstance(prompts, list) else []
    return bool(turns) and all(isinstance(turn, dict) and {"role", "content"} <= {*turn} for turn in turns)


def _prompts_file(prompts: object, column: str) -> str:
    """Return the file of the prompts; a text is a prompt, and a path is a `Path`."""
    if isinstance(prompts, Path):
        return str(prompts)
    if isinstance(prompts, str) and _is_file(prompts):
        raise OptionsError(
            code="library.prompt_is_file",
            what=f"prompts is {prompts!r}, the name of a file",
            where="argument prompts",
            why="a text is a prompt, which the model would answer; rows of a file are named by a Path",
            do=f"prompts=pathlib.Path({prompts!r}), or [{prompts!r}] for the text",
        )
    if _is_conversation(prompts):
        raise OptionsError(
            code="library.prompt_is_turns",
            what="prompts is a list of turns, of role and content",
            where="argument prompts",
            why="prompts are a text, texts or rows; a conversation is one column of a row",
            do=f"prompts=[{{{column!r}: [...]}}], with the turns as its list, and apply_chat_template=True",
        )
    texts = _texts(prompts)
    if texts is None:
        return rows_file(prompts, "prompts")
    if not texts:
        raise OptionsError(
            code="library.no_prompts",
            what="prompts is empty",
            where="argument prompts",
            why="there is nothing to answer",
            do='prompts=["2+3="]',
        )
    return rows_file([{column: text} for text in texts], "prompts")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        # too long for a name, or with a null byte: a prompt
        return False


def _texts(prompts: object) -> list[str] | None:
    """Return the prompts where they are texts; None where they are rows."""
    if isinstance(prompts, str):
        return [prompts]
    parts = list(cast("Sequence[object]", prompts)) if isinstance(prompts, list | tuple) else [None]
    texts = [part for part in parts if isinstance(part, str)]
    return texts if len(texts) == len(parts) else None


def _given(name: str, value: str) -> GivenSetting:
    return GivenSetting(name, name, (value,), KEYWORD)
