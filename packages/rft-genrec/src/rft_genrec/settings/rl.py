"""Settings of `rft-train genrec rl`: the catalogue and the reward, beside all of `rft-train rl`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rft.settings import RlSettings
from rft_dist.settings import OptimizerSettings
from rft_engine.settings import TrainingSamplingSettings
from rft_genrec.settings.catalogue import CatalogueSettings
from rft_trainer.settings.batches import BatchSettings


@dataclass(frozen=True, kw_only=True)
class ItemRewardSettings:
    """The reward of a recommended item."""

    genrec_reward: str = "rule,prefix"
    """Terms of the reward, joined by commas, each NAME or NAME=WEIGHT: rule (1 for the item that was taken), ranking
    (less for a wrong item that stands earlier in its group), prefix (levels of the ID that are right), semantic
    (cosine of the items' embeddings), collaborative (by a model of users and items)."""

    item_embeddings: str = ""
    """File of the items' embeddings (.npy, one row an item), for the term semantic; empty = none."""

    item_scorer: str = ""
    """Model of users and items for the term collaborative, as module:function, which is called with
    `item_scorer_path`; empty = none."""

    item_scorer_path: str = ""
    """What `item_scorer` is called with, such as the file of a model."""


@dataclass(frozen=True, kw_only=True)
class RecommenderBatchSettings(BatchSettings):
    """Batch sizes of sampling and training, and the split into micro-batches (which changes no result)."""

    n_samples_per_prompt: int = field(default=16, metadata={"minimum": 1})
    """Items sampled for each history; they form the group within which advantages are computed."""

    train_batch_size: int = field(default=1024, metadata={"minimum": 1})
    """Responses in one optimizer step, over all ranks."""

    micro_train_batch_size: int = field(default=64, metadata={"minimum": 1})
    """Responses in one forward and backward pass of a rank."""

    micro_rollout_batch_size: int = field(default=64, metadata={"minimum": 1})
    """Responses in one forward pass for log-probabilities without gradient."""


@dataclass(frozen=True, kw_only=True)
class RecommenderSamplingSettings(TrainingSamplingSettings):
    """Draws of items for training, among those of the catalogue."""

    constraint: str = "genrec"
    """Task among whose sequences every response is drawn: always the items of the catalogue."""


@dataclass(frozen=True, kw_only=True)
class RecommenderOptimizerSettings(OptimizerSettings):
    """The update of the policy's weights."""

    actor_learning_rate: float = field(default=1e-5, metadata={"above": 0.0})
    """Peak learning rate of the policy."""


@dataclass(frozen=True, kw_only=True)
class GenrecRlSettings(RlSettings):
    """Train a recommender on rewards of the items that it recommends; every response is an item of the catalogue."""

    catalogue: CatalogueSettings
    item_reward: ItemRewardSettings = field(default_factory=ItemRewardSettings)
    sampling: RecommenderSamplingSettings = field(default_factory=RecommenderSamplingSettings)
    batch: RecommenderBatchSettings = field(default_factory=RecommenderBatchSettings)
    optimizer: RecommenderOptimizerSettings = field(default_factory=RecommenderOptimizerSettings)
