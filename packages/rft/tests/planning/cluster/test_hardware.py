"""Clusters as they are written, and the constants behind them."""

from __future__ import annotations

import pytest

from rft.planning.cluster.hardware import FIGURES, parse_cluster
from rft_core.errors import OptionsError


def test_a_cluster_is_read_as_full_machines_or_a_part_of_one() -> None:
    cluster = parse_cluster("64xh100")
    assert (cluster.num_machines, cluster.gpus_of_machine, str(cluster)) == (8, 8, "64xH100")
    part = parse_cluster("4xH200")
    assert (part.num_machines, part.gpus_of_machine, part.gpu.memory.value) == (1, 4, 140)


@pytest.mark.parametrize("text", ["64", "64xB7", "0xH100", "12xH100", "x8H100"])
def test_another_cluster_is_refused(text: str) -> None:
    with pytest.raises(OptionsError) as caught:
        parse_cluster(text)
    assert caught.value.problem.code == "plan.cluster"


def test_every_constant_says_where_it_comes_from() -> None:
    assert all(each.source and each.unit and each.value > 0 for each in FIGURES)
    assert {each.kind for each in FIGURES} == {"measured", "published"}
