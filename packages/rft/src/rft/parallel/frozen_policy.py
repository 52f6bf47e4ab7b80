"""A model beside the one that is trained, which only scores: the reference, or a teacher."""

from __future__ import annotations

from rft.parallel.parallelize import ParallelModel, held_dtype, parallelize
from rft.parallel.shardable import ShardablePolicy
from rft.process.machine import Machine
from rft_core.errors import OptionsError
from rft_dist.settings import StrategySettings
from rft_dist.strategies.registry import choose_strategy
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_reference
from rft_models.policy.load_for_training import head_chunk_size
from rft_models.policy.load_on_meta import load_reference_on_meta
from rft_models.settings import ModelSettings
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer


def load_frozen(directory: str, model: ModelSettings, strategy: StrategySettings, machine: Machine) -> CausalPolicy:
    """Load a model as the policy is loaded, but frozen and whole; `share_frozen` gives it to the ranks."""
    load = load_reference_on_meta if strategy.meta_init else load_reference
    return load(
        directory,
        dtype=held_dtype(strategy, bf16=model.bf16),
        device=machine.device,
        flash_attn=model.flash_attn,
        head_chunk_size=head_chunk_size(model),
    )


def share_frozen(policy: CausalPolicy, strategy: StrategySettings, machine: Machine) -> ParallelModel[CausalPolicy]:
    """Shard a frozen model as the strategy shards a reference."""
    chosen = choose_strategy(strategy).reference(strategy)
    return parallelize(ShardablePolicy(policy), chosen, None, machine)


def require_same_tokenizer(directory: str, tokenizer: HfTokenizer, flag: str) -> None:
    """Refuse a model with other token ids than the policy's, before any weights are read.

    Raises:
        OptionsError: a token has another id, or one of the two models has a token that the other lacks.
        DataError: the directory has no tokenizer that can be read.
    """
    own = tokenizer.hf_tokenizer.get_vocab()
    other = load_tokenizer(directory).hf_tokenizer.get_vocab()
    different = sorted(name for name in {*own, *other} if own.get(name) != other.get(name))
    if not different:
        return
    name = different[0]
    raise OptionsError(
        code="model.other_tokenizer",
        what=f"{directory}: {len(different):,} tokens have other ids than in the policy's tokenizer, {name!r} is "
        f"{other.get(name, 'absent')} there and {own.get(name, 'absent')} here",
        where=flag,
        why="both models score the same token ids, which must mean the same text",
        do=f"{flag} with a model of the same tokenizer",
    )
