"""The pre-training term beside the rewards (PTX): its weight and its rows. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rft_trainer.settings.evaluation import EvaluationSettings
from rft_trainer.settings.sft import SequenceTrainingSettings


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings:
    """The mean loss of demonstrations or texts, added to every update of the policy (PTX)."""

    pretrain_data: str = ""
    """Demonstrations or texts whose likelihood is learned beside the rewards, as many rows an update as
    `train_batch_size`; as `prompt_data` several joined by commas, empty = none."""

    pretrain_data_probs: str = ""
    """Shares of the several `pretrain_data`, joined by commas; empty = by their sizes."""

    pretrain_split: str = "train"
    """Split of `pretrain_data` to use, where it has splits."""

    pretrain_input_key: str = "input"
    """Column of `pretrain_data` that holds the prompt of a demonstration, rendered as those of `prompt_data`."""

    pretrain_output_key: str = "output"
    """Column of `pretrain_data` that holds the response to learn."""

    pretrain_text_key: str = ""
    """Column of `pretrain_data` that holds plain texts, of which every token is learned; empty = the rows are
    demonstrations."""

    ptx_coef: float = field(default=0.05, metadata={"minimum": 0.0})
    """Weight of their mean loss a token, in nats, beside the loss of the rewards (with `pretrain_data`)."""


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """The texts to read."""

    prompt_data: str = ""
    """Texts to read: .txt files, or files of rows with `text_key`; a file, a pattern, a directory, or
    ORG/NAME[:CONFIG[:SPLIT]][@REVISION] of the Hugging Face Hub; several joined by commas."""

    prompt_split: str = "train"
    """Split of `prompt_data` to use, where it has splits."""

    text_key: str = "text"
    """Column that holds the text of a document, in files of rows."""

    text_separator: str = ""
    """Characters that end a document in a .txt file, as \\n---\\n or <|endoftext|>; empty = a file is one document."""


@dataclass(frozen=True, kw_only=True)
class TokenizerDataSettings(TextSettings):
    """The texts that a tokenizer is learned from."""

    max_characters: int = field(default=0, metadata={"minimum": 0})
    """Characters of these texts to learn from, the first ones; 0 = all."""


@dataclass(frozen=True, kw_only=True)
class PretrainDataSettings(TextSettings):
    """The texts that a model is trained on from nothing, and those held out."""

    prompt_data_probs: str = ""
    """Shares of the several `prompt_data`, joined by commas; empty = by their sizes."""

    mask_documents: bool = True
    """Let a token see none of the documents before its own, which have only their place in the stream of tokens in
    common with it."""

    max_samples: int = field(default=0, metadata={"minimum": 0})
    """Number of training windows to use; 0 = all."""

    eval_data: str = ""
    """Held-out texts, named as `prompt_data` are; empty = those of `held_out_share`."""

    eval_split: str = "test"
    """Split of `eval_data` to use, where it has splits."""

    held_out_share: float = field(default=0.0, metadata={"minimum": 0.0, "below": 1.0})
    """Share of the training texts, at their end, that is kept out of training and gives the held-out loss: characters
    of .txt files, rows of others; 0 = none."""

    max_eval_samples: int = field(default=0, metadata={"minimum": 0})
    """Number of held-out windows to use, of each set; 0 = all."""

    data_store_path: str = ""
    """Directory of the tokens on disk, which later runs on the same texts take again; empty = data in
    `RFT_CACHE`, else in ~/.cache/rft."""

    data_store_workers: int = field(default=0, metadata={"minimum": 0})
    """Processes that tokenise texts; 0 = one a core, where there is enough text for more than one. Their number changes
    no byte of the tokens."""

    data_store_max_gb: int = field(default=1000, metadata={"minimum": 1})
    """Gigabytes that all stores of the directory may take; a build that needs more ends, and names what is there."""

    dataloader_pin_memory: bool = False
    """Put prepared batches into page-locked memory (faster copies to a GPU)."""


@dataclass(frozen=True, kw_only=True)
class PretrainTrainingSettings(SequenceTrainingSettings):
    """Length of a run on texts, its batches and its loss."""

    depth: int = field(default=0, metadata={"minimum": 0, "maximum": 128})
    """One number for the whole run: blocks of a new decoder, from which follow its width (64 x depth), heads, learning
    rate, batch and number of tokens, each unless it is given; 0 = each has its own value."""

    learning_rate: float = field(default=1e-3, metadata={"above": 0.0})
    """Peak learning rate."""

    max_epochs: int = field(default=1, metadata={"minimum": 1})
    """Passes over the training text."""

    train_tokens: int = field(default=0, metadata={"minimum": 0})
    """Tokens after which the run ends, rounded up to whole steps; 0 = it ends with the epochs or `max_steps`."""

    train_batch_size: int = field(default=32, metadata={"minimum": 1})
    """Windows in one optimizer step, over all ranks."""

    train_batch_tokens: int = field(default=0, metadata={"minimum": 0})
    """Tokens in one optimizer step, over all ranks, rounded up to whole windows; 0 = `train_batch_size` says it."""

    lr_warmup_tokens: int = field(default=0, metadata={"minimum": 0})
    """Tokens in which the learning rate rises, rounded up to whole steps; 0 = `lr_warmup_steps` or `lr_warmup_ratio`
    says it."""

    lr_decay_tokens: int = field(default=0, metadata={"minimum": 0})
    """Tokens, the last ones, in which the learning rate falls in a line, rounded up to whole steps (with `lr_schedule`
    wsd); 0 = `lr_decay_ratio` says it."""

    micro_train_batch_size: int = field(default=8, metadata={"minimum": 1})
    """Windows in one forward and backward pass of a rank."""

    packing_samples: bool = True
    """Fill each forward pass up to its maximum number of tokens, also where windows are divided at documents; off =
    count documents' parts. The result of the step is the same."""

    max_len: int | None = field(default=None, metadata={"minimum": 2})
    """Tokens of a window; none = what the model can take."""

    fit_memory: Literal["auto", "off"] = "auto"
    """auto = where a step would exceed the memory of a rank, the start chooses, of the settings that are not given:
    `fused_linear_logprob`, then smaller micro-batches, then `gradient_checkpointing`; a step keeps its windows."""

    memory_limit_gb: int = field(default=0, metadata={"minimum": 0})
    """GiB that a rank may take (with `fit_memory`); 0 = what the GPU has, and on a CPU no limit."""

    z_loss_coef: float = field(default=0.0, metadata={"minimum": 0.0})
    """Weight of (log Z)^2 of each learned token in the loss, Z the sum of exp(logit); PaLM has 1e-4."""


@dataclass(frozen=True, kw_only=True)
class PretrainEvaluationSettings(EvaluationSettings):
    """The schedule of held-out evaluations, and the texts that the model continues at the end."""

    keep_best: bool = False
    """Save at every evaluation with a lower held-out loss than all before, and keep that checkpoint beyond
    `max_ckpt_num` and `max_ckpt_mem` until there is a better one."""

    sample_texts: int = field(default=3, metadata={"minimum": 0})
    """Texts that the model continues at the end of the run, from the first tokens of held-out windows or, without any,
    from nothing; shown at the end and in samples.html; 0 = none."""

    sample_tokens: int = field(default=64, metadata={"minimum": 1})
    """Most tokens that each of these texts is continued by (with `sample_texts`)."""


@dataclass(frozen=True, kw_only=True)
class PerplexityDataSettings:
    """The texts that a model predicts."""

    eval_data: str = ""
    """Texts: .txt files, or files of rows with `text_key`; a file, a pattern, a directory, or
    ORG/NAME[:CONFIG[:SPLIT]][@REVISION] of the Hugging Face Hub; several joined by commas. Empty = the
    `held_out_share` of `prompt_data`."""

    eval_split: str = "test"
    """Split of `eval_data` to use, where it has splits."""

    prompt_data: str = ""
    """Texts of whose end a share is predicted (with `held_out_share`)."""

    prompt_split: str = "train"
    """Split of `prompt_data` to use, where it has splits."""

    held_out_share: float = field(default=0.0, metadata={"minimum": 0.0, "below": 1.0})
    """Share of `prompt_data`, at its end, that is predicted, as a run of `pretrain` keeps it out of training."""

    text_key: str = "text"
    """Column that holds the text of a document, in files of rows."""

    text_separator: str = ""
    """Characters that end a document in a .txt file; empty = a file is one document."""

    mask_documents: bool = True
    """Let a token see none of the documents before its own."""

    max_eval_samples: int = field(default=0, metadata={"minimum": 0})
    """Number of windows to use, of each set; 0 = all."""

    max_len: int | None = field(default=None, metadata={"minimum": 2})
    """Tokens of a window, each of which but the first is predicted; none = what the model can take."""

    micro_train_batch_size: int = field(default=8, metadata={"minimum": 1})
    """Windows in one forward pass."""

    data_store_path: str = ""
    """Directory of the tokens on disk; empty = data in
    `RFT_CACHE`, else in ~/.cache/rft."""

    data_store_workers: int = field(default=0, metadata={"minimum": 0})
    """Processes that tokenise texts; 0 = one a core, where there is enough text for more than one."""

    data_store_max_gb: int = field(default=1000, metadata={"minimum": 1})
    """Gigabytes that all stores of the directory may take; a build that needs more ends, and names what is there."""
