"""The program of one rank: two steps of a small model under the strategy that a setting chooses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rft.parallel.parallelize import parallelize
from rft.process.machine import Machine
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies.protocols import ComputeWrapper

NUM_ROWS = 4


class SmallModel:
    """Two layers and what a strategy asks of a model (`ParallelizableModel`); loops call it through `inner`."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.dtype = torch.float32
        self._compute: Callable[..., Any] = lambda function, *arguments: function(*arguments)

    @property
    def inner(self) -> SmallModel:
        return self

    @property
    def layers(self) -> Sequence[nn.Module]:
        return [self.module[0], self.module[2]]

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.layers

    def compute_in(self, dtype: torch.dtype) -> None:
        raise AssertionError("no autocast")

    def training_flops(self) -> Any:
        return SimpleNamespace(of=lambda *sizes: 0.0)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"small.{name}", parameter) for name, parameter in self.module.named_parameters())

    trainable_parameters = named_parameters

    def release_trained_rows(self) -> Mapping[str, int]:
        return {}

    def cross_module_reads(self) -> Iterable[tuple[nn.Module, Sequence[nn.Parameter]]]:
        return ()

    def wrap_forward(self, wrapper: ComputeWrapper) -> None:
        self._compute = wrapper

    def load_pending(self, *arguments: Any) -> None: ...

    def enable_sequence_parallel(self, *arguments: Any) -> None:
        raise AssertionError("no sequences")

    def enable_tensor_parallel(self, *arguments: Any) -> Any:
        raise AssertionError("no plan")

    def enable_expert_parallel(self, *arguments: Any) -> None:
        raise AssertionError("no experts")

    def loss(self, number: int) -> Tensor:
        """Of one row, by its number."""
        row = torch.randn(6, generator=torch.Generator().manual_seed(number))
        return self._compute(lambda: self.module(row).square().sum() / NUM_ROWS)


def trained(setting: str = "", num_steps: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms and weights of steps on rows that are divided among the ranks; `setting` chooses the strategy."""
    ranks = ranks_from_environment()
    machine = Machine("cpu", ranks, start_process_group(ranks, torch.device("cpu")))
    settings = StrategySettings(**({setting: True} if setting else {}))
    parallel = parallelize(SmallModel(), settings, replace(AdamSettings(), max_norm=0.5), machine)
    norms: list[float] = []
    for step in range(num_steps):
        for number in range(parallel.data.rank, NUM_ROWS, parallel.data.world_size):
            parallel.optimizer.backward(parallel.model.loss(NUM_ROWS * step + number))
        norms.append(parallel.optimizer.step(1e-2).gradient_norm)
    return norms, {name: tensor.clone() for name, tensor in parallel.weights.full_tensors()}


def main() -> None:
    out, setting = Path(sys.argv[1]), sys.argv[2]
    norms, weights = trained(setting)
    rank = ranks_from_environment().rank
    save_file(weights, out / f"weights_{rank}.safetensors")
    (out / f"norms_{rank}.json").write_text(json.dumps(norms))
    stop_process_group()


if __name__ == "__main__":
    main()
