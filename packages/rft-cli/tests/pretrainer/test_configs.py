"""The guide's configurations check what the command checks, and say the same as flags."""

from __future__ import annotations

import pytest

from rft_cli.config.resolve import resolve
from rft_cli.pretrainer.configs import DistributedConfig, ModelConfig
from rft_core.errors import OptionsError


def test_a_decoder_says_the_same_as_flags() -> None:
    chosen = ModelConfig(hidden_size=64, num_heads=4, use_moe=True, ffn_hidden_size=None)
    values = resolve("pretrain", ["--prompt_data", "x", *chosen.flags()]).values
    assert [values[name] for name in ("hidden_size", "num_heads", "use_moe")] == [64, 4, True]
    assert chosen.flags() == ["--hidden_size", "64", "--num_heads", "4", "--use_moe", "true"]


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(OptionsError) as caught:
        ModelConfig(hidden_size=30, num_heads=4)
    assert caught.value.problem.code == "decoder.heads"


def test_the_world_is_machines_times_processes() -> None:
    environment = {"NUM_NODES": "2", "GPUS_PER_NODE": "8", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"}
    ranks = DistributedConfig.from_environment(environment)
    assert (ranks.world_size, ranks.node_rank, ranks.master_addr, ranks.master_port) == (16, 1, "a", 9)
    assert ranks.flags()[:4] == ["--distributed-master-addr", "a", "--distributed-master-port", "9"]
    assert DistributedConfig(gpus_per_node=2).flags() == ["--nproc", "2"]
    assert DistributedConfig().flags() == []


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"num_nodes": 0}, "num_nodes=1"),
        ({"node_rank": 2, "num_nodes": 2}, "node_rank=1"),
        ({"gpus_per_node": -1}, "1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes: dict[str, int], remedy: str) -> None:
    with pytest.raises(OptionsError) as caught:
        DistributedConfig(**changes)  # type: ignore[arg-type]
    assert remedy in caught.value.problem.do


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(OptionsError, match="NUM_NODES=two"):
        DistributedConfig.from_environment({"NUM_NODES": "two"})
