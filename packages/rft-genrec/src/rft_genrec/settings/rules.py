"""Settings of the commands that train which contradict one another; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rft.config.rules.sft import problems as sft_problems
from rft.config.rules.sourced_values import SourcedValues, Values
from rft.config.rules.training import idle_store
from rft_core.errors import Problem
from rft_genrec.settings.sft import RecommenderDecoderSettings
from rft_models.new_decoders.sizes import decoder_refusals
from rft_models.settings import DecoderSettings
from rft_trainer.settings.data import SftDataSettings

_FROM_CATALOGUE = (
    "prompt_data",
    "eval_data",
    "input_key",
    "output_key",
    "input_template",
    "eval_input_key",
    "eval_output_key",
    "apply_chat_template",
    "system_prompt",
    "prompt_split",
    "eval_split",
    "weight_key",
    "train_on_turns",
    "roles_to_train",
    "images_key",
)
"""Settings of rows, which a catalogue makes."""
_NO_ROWS_HELD_OUT = "sft.no_held_out"
"""Code of a problem that a catalogue solves: its split valid is held out."""
SIMILAR = "similar"
"""The task that needs embeddings."""
WALKS = "walks"
"""The task whose rows are drawn from counted transitions."""
_DRAWN = (SIMILAR, WALKS)
TASK_NAMES = ("history", "title", "id", "fusion", "titles", "titles_to_id", *_DRAWN)


def sft_rules(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of `genrec sft`."""
    yield from _rows(given)
    yield from _tasks(given)
    yield from _model(given)
    yield from (problem for problem in sft_problems(given) if problem.code != _NO_ROWS_HELD_OUT)


def sft_notes(given: SourcedValues, defaults: Values) -> list[str]:
    """Return a note for each given setting of a part that the run does not have."""
    return idle_store(given)


def chosen_tasks(tasks: str) -> list[str]:
    """Return the names of the tasks that a value of `--tasks` stands for, in its order."""
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    return [name for name in TASK_NAMES if name not in _DRAWN] if names == ["all"] else names


def rows_of_catalogue(given: SourcedValues, named: list[str], why: str) -> Problem:
    """Return the problem of settings of rows beside a catalogue, which makes them."""
    return given.make_problem("genrec.rows_of_catalogue", [*named, "catalogue"], why, f"leave {', '.join(named)} out")


def _rows(given: SourcedValues) -> Iterator[Problem]:
    defaults = {item.name: item.default for item in fields(SftDataSettings)} | {"images_key": ""}
    named = [name for name in _FROM_CATALOGUE if name in given.values and given.values[name] != defaults[name]]
    if named:
        why = "the rows are made from the catalogue, as tasks, rows and template say"
        yield rows_of_catalogue(given, named, why)


def _tasks(given: SourcedValues) -> Iterator[Problem]:
    values = given.values
    names = chosen_tasks(values["tasks"])
    wrong = [name for name in names if name not in TASK_NAMES]
    if wrong or not names or len(set(names)) < len(names):
        why = f"tasks are different ones of {', '.join(TASK_NAMES)}, or all"
        yield given.make_problem("genrec.tasks", ["tasks"], why, "--tasks history")
    if SIMILAR in names and not values["item_embeddings"]:
        why = "the task similar needs the vectors of the items' texts"
        do = "--item_embeddings FILE.npy, as `rft-train genrec embed` writes it"
        yield given.make_problem("genrec.no_embeddings", ["tasks", "item_embeddings"], why, do)
    if values["item_embeddings"] and not set(names) & set(_DRAWN):
        why = "the vectors of the items' texts are read for the tasks similar and walks, which are not trained"
        do = "--tasks history,similar"
        yield given.make_problem("genrec.idle_embeddings", ["tasks", "item_embeddings"], why, do)
    drawn = [name for name in names if name in _DRAWN]
    if drawn and values["template"] != "tokens":
        why = f"a row of the task {drawn[0]} has no instruction between its items"
        yield given.make_problem("genrec.similar_template", ["tasks", "template"], why, "--template tokens")
    if values["rows"] == "sequences" and "history" not in names:
        why = "sequences are rows of the task history, which is not trained"
        yield given.make_problem("genrec.no_sequences", ["rows", "tasks"], why, "--rows samples")
    if values["rows"] == "sequences" and values["template"] != "tokens":
        why = "a row of a whole sequence has no instruction between its items, so that other prompts would be learned"
        yield given.make_problem("genrec.sequence_template", ["rows", "template"], why, "--template tokens")


def _model(given: SourcedValues) -> Iterator[Problem]:
    values = given.values
    if values["freeze_llm"] and values["train_only_tokens_from"] >= 0:
        why = "freeze_llm finds the first new token by itself"
        names = ["freeze_llm", "train_only_tokens_from"]
        yield given.make_problem("genrec.two_freezes", names, why, "leave train_only_tokens_from out")
    if values["pretrain"]:
        own = {item.name: item.default for item in fields(RecommenderDecoderSettings)}
        named = [name for name, default in own.items() if values[name] != default]
        if named:
            why = "the shape is that of the model that pretrain names"
            names = [*named, "pretrain"]
            yield given.make_problem("genrec.has_model", names, why, f"leave {', '.join(named)} out")
        return
    chosen = DecoderSettings(**{item.name: values[item.name] for item in fields(DecoderSettings)})
    for refusal in decoder_refusals(chosen):
        yield given.make_problem(refusal.code, list(refusal.names), refusal.why, refusal.do)
    frozen = [name for name in ("freeze_llm", "lora_rank", "freeze_prefix") if values[name]]
    frozen += ["train_only_tokens_from"] if values["train_only_tokens_from"] >= 0 else []
    if frozen:
        why = "a new decoder has random weights, and what is not trained stays so"
        yield given.make_problem("genrec.frozen_new", [frozen[0], "pretrain"], why, "--pretrain DIR")
