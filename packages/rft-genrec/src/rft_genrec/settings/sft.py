"""Settings of `rft-train genrec sft`: the catalogue, the tasks, the model, beside all of `rft-train sft`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rft.settings import SftSettings
from rft_genrec.settings.catalogue import CatalogueSettings
from rft_models.settings import DecoderSettings, ModelSettings
from rft_trainer.settings.sft import SftTrainingSettings


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The tasks that the model learns from the catalogue, and the form in which it is asked."""

    tasks: str = "history"
    """Tasks, joined by commas: history (IDs to the next ID), title (an ID to its title), id (a title to its ID), fusion
    (IDs to the next title), titles (titles to the next title), titles_to_id (titles to the next ID), similar (an ID to
    the ID of an item with a similar text, of which `item_embeddings` decide), walks (an ID to an ID that counting
    transitions expects behind it, or similar texts), or all, which is all but similar and walks. Their shares are
    `prompt_data_probs`; without them a task has as many rows as its data give."""

    rows: Literal["samples", "sequences"] = "samples"
    """Rows of the task history: samples = one for each sample, which learns one item; sequences = one for each person,
    which learns every item but the first, with about a fifth of the tokens."""

    max_history: int = field(default=10, metadata={"minimum": 0})
    """Newest items of a history that a prompt holds; 0 = all."""

    item_embeddings: str = ""
    """File of vectors of the items' texts (`.npy`, a row an item, as `rft-train genrec embed` writes it), for the task
    similar; the task walks takes it too."""

    similar_steps: int = field(default=4, metadata={"minimum": 1})
    """Items that each row of the task similar learns: it goes from an item to one that is similar, and on from there.
    Every item begins one row."""

    walks_per_item: int = field(default=24, metadata={"minimum": 1})
    """Rows of the task walks that begin at each item: the next item is drawn from what the transitions of the training
    sequences, decayed over three steps, and similar texts say of the four newest."""

    walk_steps: int = field(default=10, metadata={"minimum": 1})
    """Items that each row of the task walks learns."""

    walk_text_weight: float = field(default=0.3, metadata={"minimum": 0.0})
    """Weight of similar texts beside the transitions in the task walks, where `item_embeddings` are given."""

    template: Literal["tokens", "instruction", "chat"] = "tokens"
    """Form of a prompt: tokens = the IDs alone; instruction = an instruction in plain text around them; chat = the same
    in the chat template of the model."""


@dataclass(frozen=True, kw_only=True)
class RecommenderModelSettings(ModelSettings):
    """The model that learns the IDs: one that exists, or a new decoder."""

    pretrain: str = ""
    """Model to start from: a Hugging Face directory on this machine, or ORG/NAME[@REVISION] of the Hub. The tokens of
    the IDs are added to its vocabulary, unless it was trained on the same IDs. Empty = a new decoder with the tokens of
    the IDs and of bytes."""

    freeze_llm: bool = field(default=False, metadata={"aliases": ("freeze_LLM",)})
    """Train the rows of the new tokens alone, in the embedding and the output matrix; every other weight keeps its
    bits. --freeze_LLM is the same flag."""


@dataclass(frozen=True, kw_only=True)
class RecommenderDecoderSettings(DecoderSettings):
    """The architecture of a new decoder, where no model is named."""

    hidden_size: int = field(default=64, metadata={"minimum": 2})
    """Width of the decoder."""

    num_heads: int = field(default=4, metadata={"minimum": 1})
    """Query heads of each block; hidden_size / num_heads is an even whole number."""


@dataclass(frozen=True, kw_only=True)
class RecommenderTrainingSettings(SftTrainingSettings):
    """Epochs, batch sizes, loss and early stopping."""

    learning_rate: float = field(default=3e-4, metadata={"above": 0.0})
    """Peak learning rate; a new decoder learns faster with 3e-3."""

    max_epochs: int = field(default=10, metadata={"minimum": 1})
    """Passes over the training rows."""

    train_batch_size: int = field(default=128, metadata={"minimum": 1})
    """Sequences in one optimizer step, over all ranks."""

    micro_train_batch_size: int = field(default=32, metadata={"minimum": 1})
    """Sequences in one forward and backward pass of a rank."""


@dataclass(frozen=True, kw_only=True)
class GenrecSftSettings(SftSettings):
    """Train a model to write the semantic ID of the next item."""

    catalogue: CatalogueSettings
    model: RecommenderModelSettings = field(default_factory=RecommenderModelSettings)
    decoder: RecommenderDecoderSettings = field(default_factory=RecommenderDecoderSettings)
    tasks: TaskSettings = field(default_factory=TaskSettings)
    training: RecommenderTrainingSettings = field(default_factory=RecommenderTrainingSettings)
