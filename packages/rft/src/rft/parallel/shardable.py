"""Policy, critic and reward model in the form that a strategy distributes (`ParallelizableModel`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rft_core.packed_tokens import PackedTokens
from rft_dist.settings import SequenceMode
from rft_dist.strategies.protocols import ComputeWrapper, ReadBlock, ShardableModel, TensorPlan
from rft_models.backbone.training_flops import TrainingFlops, training_flops

if TYPE_CHECKING:
    from rft_dist.strategies.process_groups import ExpertGroup, TensorGroup
    from rft_dist.strategies.sequence_parallel import SequenceGroup
    from rft_models.critic.causal_critic import CausalCritic
    from rft_models.policy.causal_policy import CausalPolicy
    from rft_models.reward_model.model import RewardModel

ModelT_co = TypeVar("ModelT_co", covariant=True)


class ParallelizableModel(ShardableModel, Protocol[ModelT_co]):
    """A model that can be distributed, and what computes with its weights afterwards."""

    @property
    def inner(self) -> ModelT_co:
        """The object that training and evaluation call."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        ...

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute the products of layers and head in this type (autocast)."""
        ...

    def training_flops(self) -> TrainingFlops:
        """Return the operations of training on a sequence, asked while its matrices are whole."""
        ...


class ShardablePolicy:
    """A policy as strategies take it; also one that is not trained."""

    def __init__(self, policy: CausalPolicy) -> None:
        self.inner = policy

    @property
    def module(self) -> nn.Module:
        """The transformers model of the policy."""
        return self.inner.model

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers, in the order of the forward."""
        return self.inner.layers

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The decoder's layers, in their order."""
        return self.inner.layers

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.inner.dtype

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute the products of layers and head in this type."""
        self.inner.backbone.autocast = dtype

    def training_flops(self) -> TrainingFlops:
        """Count the decoder's layers and the output matrix."""
        config = self.inner.model.config.get_text_config(decoder=True)
        return training_flops(self.blocks, self.inner.head.weight, config)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters, those of adapters among them."""
        return self.inner.named_parameters()

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that an optimizer steps on; of a matrix with trained rows, those rows."""
        return self.inner.trainable_parameters()

    def release_trained_rows(self) -> Mapping[str, int]:
        """Train whole matrices in place of their rows, see `PackedModel.release_trained_rows`."""
        return self.inner.release_trained_rows()

    def cross_module_reads(self) -> Iterable[tuple[nn.Module, Sequence[nn.Parameter]]]:
        """Yield the modules of adapters that read the matrix under them."""
        return () if self.inner.adapters is None else self.inner.adapters.cross_module_reads()

    def wrap_forward(self, wrapper: ComputeWrapper) -> None:
        """Run every forward inside `wrapper`."""
        self.inner.wrap_forward(wrapper)

    def load_pending(
        self, load_shards: Callable[[ReadBlock], None], device: torch.device, compute_dtype: torch.dtype | None
    ) -> None:
        """Read the weights of a policy that was made without memory, and compare its forward with the model's own."""
        files = self.inner.pending_weights
        if files is None:
            return
        load_shards(files.block)
        files.close()
        # the files are closed: every block is in memory
        self.inner.pending_weights = None
        self.inner.verify(device=device, dtype=compute_dtype)

    def enable_sequence_parallel(self, group: SequenceGroup, mode: SequenceMode) -> None:
        """Compute every packed row together with the ranks of the group."""
        self.inner.enable_sequence_parallel(group, mode)

    def enable_tensor_parallel(self, group: TensorGroup, shard: Callable[[TensorPlan], None]) -> TensorPlan:
        """Cut the matrices, and compare the log-probabilities of a probe before and after."""
        from rft_models.policy.tensor_parallel_plan import apply_tensor_parallel, tensor_plan

        plan = tensor_plan(self.inner, group.size)
        apply_tensor_parallel(self.inner, lambda: shard(plan), group, shares_head=bool(plan.vocabulary))
        return plan

    def enable_expert_parallel(self, group: ExpertGroup, divide: Callable[[Sequence[str]], None]) -> None:
        """Divide the experts, and compare the log-probabilities of a probe before and after."""
        from rft_models.policy.expert_parallel import divide_experts

        divide_experts(self.inner, group, divide)


class ShardableCritic:
    """A critic as strategies take it: decoder and value head as one module."""

    def __init__(self, critic: CausalCritic) -> None:
        self.inner = WrappedCritic(critic)
        self._critic = critic
        self._module = _DecoderAndHead(critic)

    @property
    def module(self) -> nn.Module:
        """Decoder and value head as one module."""
        return self._module

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers, and the head by itself: it is float32, whatever the others are."""
        return [*self.blocks, self._critic.head]

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The decoder's layers without the head."""
        return list(self._critic.model.get_decoder().layers)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the decoder's weights."""
        return self._critic.dtype

    def compute_in(self, dtype: torch.dtype) -> None:
        """Raise: a critic computes in its own type (`ParallelStrategy.critic`)."""
        raise AssertionError("a critic computes in the type of its weights")

    def training_flops(self) -> TrainingFlops:
        """Count the decoder's layers; the head is one row."""
        return training_flops(self.blocks, None, self._critic.model.config.get_text_config(decoder=True))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters, by their names in saved files."""
        return self._critic.named_parameters()

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that an optimizer steps on."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def release_trained_rows(self) -> Mapping[str, int]:
        """Return no matrix: all rows of a critic are trained."""
        return {}

    def cross_module_reads(self) -> Iterable[tuple[nn.Module, Sequence[nn.Parameter]]]:
        """Yield the modules of adapters that read the matrix under them."""
        return () if self._critic.adapters is None else self._critic.adapters.cross_module_reads()

    def wrap_forward(self, wrapper: ComputeWrapper) -> None:
        """Run every forward inside `wrapper`; a vision tower is used for rows without images too."""
        self.inner.forward_wrapper = wrapper
        self._critic.gather_always()

    def load_pending(
        self, load_shards: Callable[[ReadBlock], None], device: torch.device, compute_dtype: torch.dtype | None
    ) -> None:
        """Do nothing: a critic is loaded with its weights."""

    def enable_sequence_parallel(self, group: SequenceGroup, mode: SequenceMode) -> None:
        """Raise: a critic computes its own sequences (`ParallelStrategy.critic`)."""
        raise AssertionError("every rank computes whole sequences of a critic")

    def enable_tensor_parallel(self, group: TensorGroup, shard: Callable[[TensorPlan], None]) -> TensorPlan:
        """Raise: a critic computes with whole matrices (`ParallelStrategy.critic`)."""
        raise AssertionError("every rank computes with whole matrices of a critic")

    def enable_expert_parallel(self, group: ExpertGroup, divide: Callable[[Sequence[str]], None]) -> None:
        """Raise: a critic computes with all its experts (`ParallelStrategy.critic`)."""
        raise AssertionError("every rank computes with all experts of a critic")


class ShardableRewardModel:
    """A reward model as strategies take it: decoder and heads as one module."""

    def __init__(self, model: RewardModel) -> None:
        self.inner = WrappedRewardModel(model)
        self._model = model
        self._module = _DecoderAndHead(model)

    @property
    def module(self) -> nn.Module:
        """Decoder and heads as one module."""
        return self._module

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers, and the head by itself: it is float32, whatever the others are."""
        return [*self.blocks, self._model.head]

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The decoder's layers without the head."""
        return self._model.layers

    @property
    def dtype(self) -> torch.dtype:
        """Type of the decoder's weights."""
        return self._model.dtype

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute the products of the layers in this type; heads are float32."""
        self._model.backbone.autocast = dtype

    def training_flops(self) -> TrainingFlops:
        """Count the decoder's layers; a head is a row."""
        return training_flops(self.blocks, None, self._model.model.config.get_text_config(decoder=True))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters, by their names in saved files."""
        return self._model.named_parameters()

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that an optimizer steps on."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def release_trained_rows(self) -> Mapping[str, int]:
        """Return no matrix: all rows of a reward model are trained."""
        return {}

    def cross_module_reads(self) -> Iterable[tuple[nn.Module, Sequence[nn.Parameter]]]:
        """Yield the modules of adapters that read the matrix under them."""
        return () if self._model.adapters is None else self._model.adapters.cross_module_reads()

    def wrap_forward(self, wrapper: ComputeWrapper) -> None:
        """Run every forward inside `wrapper`; a vision tower is used for rows without images too."""
        self.inner.forward_wrapper = wrapper
        self._model.gather_always()

    def load_pending(
        self, load_shards: Callable[[ReadBlock], None], device: torch.device, compute_dtype: torch.dtype | None
    ) -> None:
        """Do nothing: a reward model is loaded with its weights."""

    def enable_sequence_parallel(self, group: SequenceGroup, mode: SequenceMode) -> None:
        """Raise: the rules of the command refuse it."""
        raise AssertionError("every rank computes whole sequences of a reward model")

    def enable_tensor_parallel(self, group: TensorGroup, shard: Callable[[TensorPlan], None]) -> TensorPlan:
        """Raise: the rules of the command refuse it."""
        raise AssertionError("every rank computes with whole matrices of a reward model")

    def enable_expert_parallel(self, group: ExpertGroup, divide: Callable[[Sequence[str]], None]) -> None:
        """Raise: the rules of the command refuse it."""
        raise AssertionError("every rank computes with all experts of a reward model")


class WrappedRewardModel:
    """A reward model whose forward runs inside the wrapper of a strategy, where there is one."""

    def __init__(self, model: RewardModel) -> None:
        self.reward_model = model
        self.forward_wrapper: ComputeWrapper | None = None

    def score_matrix(self, tokens: PackedTokens) -> Tensor:
        """Compute the scores, with the weights gathered."""
        if self.forward_wrapper is None:
            return self.reward_model.score_matrix(tokens)
        return self.forward_wrapper(self.reward_model.score_matrix, tokens)

    def step_scores(self, tokens: PackedTokens) -> Tensor:
        """Compute the scores of the steps, with the weights gathered."""
        if self.forward_wrapper is None:
            return self.reward_model.step_scores(tokens)
        return self.forward_wrapper(self.reward_model.step_scores, tokens)

    def train(self, mode: bool = True) -> None:
        """Switch to training mode, or to evaluation."""
        self.reward_model.train(mode)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by name, as this rank keeps them."""
        return self.reward_model.named_parameters()


class WrappedCritic:
    """A critic whose forward runs inside the wrapper of a strategy, where there is one."""

    def __init__(self, critic: CausalCritic) -> None:
        self._critic = critic
        self.forward_wrapper: ComputeWrapper | None = None

    def values(self, tokens: PackedTokens) -> Tensor:
        """Compute the critic's values, with its weights gathered."""
        if self.forward_wrapper is None:
            return self._critic.values(tokens)
        return self.forward_wrapper(self._critic.values, tokens)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by name, as this rank keeps them."""
        return self._critic.named_parameters()


class _DecoderAndHead(nn.Module):
    """Decoder and head as one module, whose forward is any use of them."""

    def __init__(self, model: CausalCritic | RewardModel) -> None:
        super().__init__()
        self.model, self.head = model.model, model.head
