"""Training from Python: `rft.grpo`, `rft.rl`, `rft.sft`, `rft.dpo`, `rft.reward_model`, settings as typed keywords.

```python
import rft

def reward(responses, labels):
    return [float(response.strip() == label) for response, label in zip(responses, labels)]

run = rft.grpo("Qwen/Qwen3-0.6B", [{"input": "2+3=", "label": "5"}], reward, max_steps=100)
run.plot()
```

They make the run that `rft-train` makes with the command of that name: same settings, same errors, same directory.
Nothing is printed; a notebook gets a panel.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rft.config.commands import DPO, PRETRAIN, RL, RM, SFT, load
from rft.config.origins import KEYWORD, GivenSetting
from rft.front_end import FrontEnd
from rft.library.callbacks import Callback, CallbackSink
from rft.library.given_model import model_place
from rft.library.given_rewards import ChosenReward, GivenReward, chosen_reward, refuse_weights_in_order
from rft.library.given_rows import Rows, rows_file
from rft.library.keyword_settings import command_words, givens, resolved
from rft.library.named_arguments import training_arguments
from rft.library.notebook_panel import NotebookPanel, in_notebook
from rft.library.python_errors import python_words
from rft.library.run import Run
from rft.resolved import Resolved
from rft_core.errors import OptionsError, SavedAfterSignal
from rft_trainer.metrics.sink import Sink
from rft_trainer.runs.stop_signals import BY_PROGRAM, StopSignals
from rft_trainer.settings.run import RunSettings

if TYPE_CHECKING:
    from typing import Unpack

    from rft.library.keywords.training_keywords import (
        DpoKeywords,
        PretrainKeywords,
        RlKeywords,
        RmKeywords,
        SftKeywords,
    )

Config: TypeAlias = str | Path | Sequence[str | Path]
"""Files of settings, or directories of runs."""
Model: TypeAlias = object
"""A directory, a name on the Hub, a `Run`, or a model of transformers."""

_GRPO = "grpo"


@training_arguments
def grpo(
    model: Model,
    data: Rows,
    reward: GivenReward | None = None,
    *,
    eval_data: Rows | None = None,
    tokenizer: object | None = None,
    config: Config = (),
    callbacks: Sequence[Callback] = (),
    panel: bool | None = None,
    **settings: Unpack[RlKeywords],
) -> Run:
    """Train a policy by GRPO (Shao et al. 2024, arXiv 2402.03300): `rl` with `advantage_estimator="grpo"`.

    Raises:
        OptionsError: another `advantage_estimator`; and what `rl` raises.
    """
    chosen = settings.get("advantage_estimator", _GRPO)
    if chosen not in (_GRPO, "group_norm"):
        raise OptionsError(
            code="library.not_grpo",
            what=f"rft.grpo with advantage_estimator={chosen!r}",
            where="keyword argument advantage_estimator",
            why="grpo is an algorithm as a whole",
            state="nothing was started",
            do=f"rft.rl(..., advantage_estimator={chosen!r})",
        )
    return rl(
        model,
        data,
        reward,
        eval_data=eval_data,
        tokenizer=tokenizer,
        config=config,
        callbacks=callbacks,
        panel=panel,
        **{**settings, "advantage_estimator": chosen},
    )


@training_arguments
def rl(
    model: Model,
    data: Rows,
    reward: GivenReward | None = None,
    *,
    eval_data: Rows | None = None,
    tokenizer: object | None = None,
    config: Config = (),
    callbacks: Sequence[Callback] = (),
    panel: bool | None = None,
    **settings: Unpack[RlKeywords],
) -> Run:
    """Train a policy on rewards of its own responses, as `rft-train rl` does, and return the run.

    Args:
        model: a directory, a name on the Hub, a `Run`, or a model of transformers.
        data: training rows as dicts, a `datasets.Dataset` or a pandas frame; a path or a name on the Hub.
        reward: a function of responses, labels and any columns (docs/rewards.md), several functions that are added
            up, or a name as `--reward` takes it. A function is called in this process.
        eval_data: held-out rows, scored before, along and after the training.
        tokenizer: of a model of transformers that was loaded from no directory.
        config: files of settings, or run directories; keywords win over them.
        callbacks: called after every step and evaluation.
        panel: whether a panel is shown; None: in a notebook.
        **settings: those of `rft-train rl` under the names of their flags (docs/reference/rl.md).

    Raises:
        SettingsError: with every problem of the settings, as on the command line.
        RftError: what ends `rft-train rl` with an exit code; an interrupt ends it as `SavedAfterSignal` once the
            step is finished and saved.
    """
    chosen = chosen_reward(reward)
    refuse_weights_in_order(settings.get("reward_weights"), chosen)
    own = [*_places(model, data, eval_data, tokenizer), *_reward_setting(chosen)]
    prepared = resolved(RL.name, settings, config, own)
    return _trained(prepared, [*givens(RL.name, settings), *own], config, callbacks, panel, chosen)


@training_arguments
def sft(
    model: Model,
    data: Rows,
    *,
    eval_data: Rows | None = None,
    tokenizer: object | None = None,
    config: Config = (),
    callbacks: Sequence[Callback] = (),
    panel: bool | None = None,
    **settings: Unpack[SftKeywords],
) -> Run:
    """Train a model on demonstrations, as `rft-train sft` does, and return the run.

    Arguments and errors are those of `rl`; the settings are in docs/reference/sft.md.
    """
    own = _places(model, data, eval_data, tokenizer)
    prepared = resolved(SFT.name, settings, config, own)
    return _trained(prepared, [*givens(SFT.name, settings), *own], config, callbacks, panel)


def pretrain(
    data: Rows,
    *,
    model: Model = "",
    eval_data: Rows | None = None,
    config: Config = (),
    callbacks: Sequence[Callback] = (),
    panel: bool | None = None,
    **settings: Unpack[PretrainKeywords],
) -> Run:
    """Train a language model on texts, as `rft-train pretrain` does, and return the run.

    Args:
        data: texts: a path, a name on the Hub, or rows with a column `text`.
        model: whose training goes on; "" is a new decoder of the sizes in `settings`.
        eval_data: held-out texts.
        config: as for `rl`.
        callbacks: as for `rl`.
        panel: as for `rl`.
        **settings: those of docs/reference/pretrain.md.

    Raises:
        SettingsError, RftError: as `rl`.
    """
    own = [GivenSetting("prompt_data", "prompt_data", (rows_file(data, "data"),), KEYWORD)]
    if model:
        own.append(GivenSetting("pretrain", "pretrain", (model_place(model, None),), KEYWORD))
    if eval_data is not None:
        own.append(GivenSetting("eval_data", "eval_data", (rows_file(eval_data, "eval_data"),), KEYWORD))
    prepared = resolved(PRETRAIN.name, settings, config, own)
    return _trained(prepared, [*givens(PRETRAIN.name, settings), *own], config, callbacks, panel)


def dpo(
    model: Model,
    data: Rows,
    *,
    eval_data: Rows | None = None,
    tokenizer: object | None = None,
    config: Config = (),
    callbacks: Sequence[Callback] = (),
    panel: bool | None = None,
    **settings: Unpack[DpoKeywords],
) -> Run:
    """Train a model on preferences between responses, as `rft-train dpo` does, and return the run.

    `loss_type` chooses among DPO (Rafailov et al. 2023, arXiv 2305.18290) and its relatives. Rows have the columns that
    docs/preferences.md lists. Arguments and errors are those of `rl`; the settings are in docs/reference/dpo.md.
    """
    own = _places(model, data, eval_data, tokenizer)
    prepared = resolved(DPO.name, settings, config, own)
    return _trained(prepared, [*givens(DPO.name, settings), *own], config, callbacks, panel)


def reward_model(
    model: Model,
    data: Rows,
    *,
    eval_data: Rows | None = None,
    tokenizer: object | None = None,
    config: Config = (),
    callbacks: Sequence[Callback] = (),
    panel: bool | None = None,
    **settings: Unpack[RmKeywords],
) -> Run:
    """Train a reward model on pairs of responses, as `rft-train rm` does, and return the run.

    `model` is a language model, which gets a new head, or a reward model, which is trained on; the rows have a prompt
    and two responses (docs/reward-models.md). Other arguments and errors are those of `rl`; the settings are in
    docs/reference/rm.md.
    """
    own = _places(model, data, eval_data, tokenizer)
    prepared = resolved(RM.name, settings, config, own)
    return _trained(prepared, [*givens(RM.name, settings), *own], config, callbacks, panel)


def _places(model: Model, data: Rows, eval_data: Rows | None, tokenizer: object | None) -> list[GivenSetting]:
    """Return the settings that say where model and rows are, once they are written where they were objects."""
    places = {"pretrain": model_place(model, tokenizer), "prompt_data": rows_file(data, "data")}
    if eval_data is not None:
        places["eval_data"] = rows_file(eval_data, "eval_data")
    return [GivenSetting(name, name, (place,), KEYWORD) for name, place in places.items()]


def _reward_setting(chosen: ChosenReward) -> list[GivenSetting]:
    return [GivenSetting("reward", "reward", (chosen.setting,), KEYWORD)] if chosen.setting else []


def _trained(
    prepared: Resolved[Any],
    options: Sequence[GivenSetting],
    config: Config,
    callbacks: Sequence[Callback],
    panel: bool | None,
    chosen: ChosenReward | None = None,
) -> Run:
    """Train to the end of the run, or to where a callback stops it."""
    script = ""
    command = command_words(prepared.command, options, config)
    if chosen is not None and chosen.function is not None:
        # `rft-train resume` cannot find code of a program: then the program is the command
        command = script_words()
        script = " ".join(command)
    return train(prepared, command, callbacks=callbacks, panel=panel, chosen=chosen, script=script)


@python_words()
def train(
    prepared: Resolved[Any],
    command: Sequence[str],
    *,
    callbacks: Sequence[Callback] = (),
    panel: bool | None = None,
    chosen: ChosenReward | None = None,
    script: str = "",
    in_place: Path | None = None,
) -> Run:
    """Train with settings that are resolved; `in_place` continues the run in that directory."""
    _refuse_restarts(prepared)
    chosen_at: list[Path] = []
    front = _front(callbacks, in_notebook() if panel is None else panel, chosen_at)
    # around the run's own handlers: a callback asks the innermost for a stop
    signals = StopSignals()
    try:
        if prepared.command == RL.name:
            from rft.stages import rl as stage

            function = chosen.function if chosen is not None else None
            trained = stage.train(
                prepared, command, in_place=in_place, front=front, reward=function, script=script, signals=signals
            )
        else:
            # by name, since a stage brings torch
            place = "rft.pretraining.stage" if prepared.command == PRETRAIN.name else f"rft.stages.{prepared.command}"
            stage_train = load(f"{place}:train")
            trained = stage_train(prepared, command, in_place=in_place, front=front, signals=signals)
    except SavedAfterSignal:
        # a callback ends a run as it likes; whoever interrupts the program wants no line after this one to run
        if signals.received != BY_PROGRAM:
            raise
        return Run(chosen_at[0])
    return Run(trained.directory.path)


def _refuse_restarts(prepared: Resolved[Any]) -> None:
    # of a stored run it is a setting of the command that began it
    if prepared.values["restarts"] and prepared.origins["restarts"] == KEYWORD:
        raise OptionsError(
            code="library.restarts",
            what=f"restarts = {prepared.values['restarts']}",
            where="keyword argument",
            why="a program that dies cannot start its run again; the command can, since it trains in another process",
            state="nothing was started",
            do=f"rft-train {prepared.command} --restarts {prepared.values['restarts']}",
        )


def script_words() -> list[str]:
    """Return the command of this program; of a notebook or a prompt, which have none, a text that says so."""
    if hasattr(sys.modules.get("__main__"), "__file__") and not in_notebook():
        return ["python", *sys.argv]
    return ["python", "(a notebook or a prompt)"]


def _front(callbacks: Sequence[Callback], shows: bool, chosen_at: list[Path]) -> FrontEnd:
    if getattr(callbacks, "on_step", None) is not None:
        raise _no_callback(f"callbacks is one {type(callbacks).__name__}", "callbacks=[CALLBACK]")
    for callback in callbacks:
        if isinstance(callback, type):
            raise _no_callback(
                f"{callback.__name__} is a class, and no object of it", f"callbacks=[{callback.__name__}()]"
            )
        # people pass functions
        if getattr(callback, "on_step", None) is None:
            raise _no_callback(
                f"{callback!r} is no rft.Callback", "class MyCallback(rft.Callback), and callbacks=[MyCallback()]"
            )

    def make_sinks(run: RunSettings, num_steps: int) -> list[Sink]:
        shown: list[Sink] = [NotebookPanel(num_steps)] if shows else []
        return [*shown, CallbackSink(callbacks)] if callbacks else shown

    return FrontEnd(make_sinks=make_sinks, run_chosen=chosen_at.append)


def _no_callback(what: str, do: str) -> OptionsError:
    return OptionsError(
        code="library.callback",
        what=what,
        where="argument callbacks",
        why="it is a list of objects; a run calls on_begin, on_step, on_evaluation and on_end of each",
        state="nothing was started",
        do=do,
    )
