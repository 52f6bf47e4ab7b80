"""Data settings: the rows to read, and the prompt of a row. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rft_core.errors import SettingsRefusal


@dataclass(frozen=True, kw_only=True)
class PromptTextSettings:
    """The prompt that is rendered from a row of data."""

    input_key: str = "input"
    """Column that holds the prompt (text, or a list of chat messages)."""

    input_template: str = ""
    """Text around the prompt, with {} where the prompt goes; empty = the prompt as it is."""

    apply_chat_template: bool = False
    """Render the prompt with the tokenizer's chat template."""

    system_prompt: str = ""
    """System message put before the prompt (with `apply_chat_template`); empty = none."""


def system_prompt_refusal(system_prompt: str, *, apply_chat_template: bool) -> SettingsRefusal | None:
    """Return the refusal of a system prompt that nothing renders; None where there is none, or a chat template."""
    if not system_prompt or apply_chat_template:
        return None
    return SettingsRefusal(
        code="prompt.system_without_chat",
        names=("system_prompt", "apply_chat_template"),
        why="a system prompt is a message, and only the chat template turns messages into text",
        do="--apply_chat_template",
    )


@dataclass(frozen=True, kw_only=True)
class HeldOutRowsSettings:
    """The held-out rows to read."""

    eval_data: str = ""
    """Held-out data: a .jsonl, .json, .csv or .parquet file, a pattern, a directory,
    ORG/NAME[:CONFIG[:SPLIT]][@REVISION] of the Hugging Face Hub, or TASK:ARGUMENT of an installed task. Several
    sets are joined by commas, each with a name of its own if wanted: gsm8k=test.jsonl,aime=aime.parquet."""

    eval_split: str = "test"
    """Split of `eval_data` to use, where it has splits."""

    max_eval_samples: int = field(default=500, metadata={"minimum": 0})
    """Number of held-out rows to use, of each set; 0 = all."""


@dataclass(frozen=True, kw_only=True)
class HeldOutSettings(HeldOutRowsSettings, PromptTextSettings):
    """The held-out rows for evaluation."""


@dataclass(frozen=True, kw_only=True)
class EvalDataSettings(HeldOutSettings):
    """The held-out rows, with their answers."""

    label_key: str = "label"
    """Column that holds the answer a reward compares with."""

    eval_metrics: str = ""
    """Installed tasks whose metrics every evaluation has beside accuracy and reward, joined by commas; empty = none."""


@dataclass(frozen=True, kw_only=True)
class ScoredDataSettings(EvalDataSettings):
    """The held-out rows, with their answers."""

    input_key: str = field(default=EvalDataSettings.input_key, metadata={"aliases": ("eval_input_key",)})
    """Column that holds the prompt (text, or a list of chat messages); --eval_input_key is the same flag."""

    label_key: str = field(default=EvalDataSettings.label_key, metadata={"aliases": ("eval_label_key",)})
    """Column that holds the answer a reward compares with; --eval_label_key is the same flag."""


@dataclass(frozen=True, kw_only=True)
class HeldOutColumnSettings:
    """The columns of held-out rows."""

    eval_input_key: str = ""
    """Column of the held-out rows that holds the prompt; empty = that of the training rows (`input_key`)."""


@dataclass(frozen=True, kw_only=True)
class TrainRowsSettings:
    """The rows to train on, and how they are read."""

    prompt_data: str = ""
    """Training data: a file, a pattern, a directory, ORG/NAME[:CONFIG[:SPLIT]][@REVISION] of the Hugging Face Hub, or
    TASK:ARGUMENT of an installed task; several joined by commas."""

    prompt_data_probs: str = ""
    """Shares of the several `prompt_data`, joined by commas; empty = by their sizes."""

    prompt_split: str = "train"
    """Split of `prompt_data` to use, where it has splits."""

    max_samples: int = field(default=0, metadata={"minimum": 0})
    """Number of training rows to use; 0 = all."""

    num_workers: int = field(default=-1, metadata={"minimum": -1})
    """Threads that render and tokenize rows; 0 = do it in the main thread, -1 = there too, until the times of the
    batches show that steps wait for them, and by as many threads as keep up from then on."""

    prefetch_factor: int = field(default=2, metadata={"minimum": 1})
    """Batches that each of these threads prepares in advance (with `num_workers`)."""

    dataloader_pin_memory: bool = False
    """Put prepared batches into page-locked memory (faster copies to a GPU)."""


@dataclass(frozen=True, kw_only=True)
class StoredRowsSettings(TrainRowsSettings):
    """The rows to train on, which may be kept on disk as tokens."""

    data_store: Literal["auto", "on", "off"] = "auto"
    """Whether the training rows are tokenised once into files that are mapped into memory, so that they need not fit:
    auto = for .jsonl and .parquet files of more than 16 MiB, or 131,072 records of parquet; for pairs, of 256 MiB."""

    data_store_path: str = ""
    """Directory of these files, which later runs on the same data take again; empty = data in
    `RFT_CACHE`, else in ~/.cache/rft."""

    data_store_workers: int = field(default=0, metadata={"minimum": 0})
    """Processes that tokenise rows for the data store; 0 = one a core, where there are enough rows for more than one.
    Their number changes no byte of it."""

    data_store_max_gb: int = field(default=1000, metadata={"minimum": 1})
    """Gigabytes that all stores of the directory may take; a build that needs more ends, and names what is there."""


@dataclass(frozen=True, kw_only=True)
class DataSettings(HeldOutColumnSettings, EvalDataSettings, StoredRowsSettings):
    """Prompts to train on and to evaluate on."""

    eval_label_key: str = ""
    """Column of the held-out rows that holds the answer; empty = that of the training rows (`label_key`)."""


@dataclass(frozen=True, kw_only=True)
class SftDataSettings(HeldOutColumnSettings, HeldOutSettings, StoredRowsSettings):
    """Demonstrations to train on and to evaluate on."""

    output_key: str = "output"
    """Column that holds the response to learn."""

    eval_output_key: str = ""
    """Column of the held-out rows that holds the response; empty = that of the training rows (`output_key`)."""

    weight_key: str = ""
    """Column of the training rows that holds their weights: a step's loss is the sum of weight x loss over its learned
    tokens, divided by the sum of these weights. A row of weight 0 is left out; empty = every row weighs 1."""

    train_on_turns: Literal["all", "last"] = "all"
    """Which turns of a whole conversation (`messages`, `conversations`) are learned: all of `roles_to_train`, or the
    last of them alone. A message's own "train": false or "weight": 0 takes it out."""

    roles_to_train: str = "assistant"
    """Roles whose turns are learned, joined by commas: assistant, user, system, developer, tool."""

    held_out_rows: int = field(default=0, metadata={"minimum": 0})
    """Training rows, chosen by the seed, that are kept out of training and give the held-out loss; 0 = none."""


@dataclass(frozen=True, kw_only=True)
class BuildDataSettings:
    """The texts that a tokenizer is learned from."""

    texts: str
    """Files of texts, joined by commas: .txt as it is, or a file of rows with `text_keys`."""

    text_keys: str = "text"
    """Columns of the rows that hold texts, joined by commas; rows without `text` give the prompt with the response
    that `rft-train sft` reads, or with the label of `rl`."""


@dataclass(frozen=True, kw_only=True)
class GenerateDataSettings(PromptTextSettings):
    """The prompts to answer, and the number of completions."""

    prompt: str = ""
    """One prompt given as text; empty = the rows of `prompt_data`."""

    prompt_data: str = ""
    """Prompts to answer: a file, a pattern, a directory, or ORG/NAME[:CONFIG[:SPLIT]][@REVISION]."""

    prompt_split: str = "train"
    """Split of `prompt_data` to use, where it has splits."""

    max_samples: int = field(default=0, metadata={"minimum": 0})
    """Number of prompts to answer; 0 = all."""

    n_samples_per_prompt: int = field(default=1, metadata={"minimum": 1})
    """Responses sampled for each prompt."""


@dataclass(frozen=True, kw_only=True)
class ConformanceDataSettings(GenerateDataSettings):
    """The prompts that engines continue; without any, a few short texts that are built in."""

    max_samples: int = field(default=16, metadata={"minimum": 0})
    """Number of prompts to use; 0 = all."""

    n_samples_per_prompt: int = field(default=4, metadata={"minimum": 1})
    """Responses sampled for each prompt."""
