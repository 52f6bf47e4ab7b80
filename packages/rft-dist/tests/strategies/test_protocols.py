"""What a strategy is given: the options of its optimizer, and the type of its forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rft_dist.collectives import SingleProcess
from rft_dist.optim.loss_scaler import LossScaler
from rft_dist.optim.parameter_groups import ParameterGroups
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies.protocols import StrategyContext, narrow_dtype


def context_of(adam: AdamSettings | None, **settings: Any) -> StrategyContext:
    chosen = StrategySettings(**settings)
    return StrategyContext(settings=chosen, collectives=SingleProcess(), device=torch.device("cpu"), adam=adam)


ADAM = AdamSettings(adam_betas=(0.5, 0.75), adam_epsilon=0.25, l2=0.125, max_norm=3.0, l2_factors="table=0.5")
GROUPS = ParameterGroups(embeddings=frozenset({"table"}), decays=(("table", 0.5),))
OPTIONS = {"betas": (0.5, 0.75), "epsilon": 0.25, "weight_decay": 0.125, "max_norm": 3.0, "groups": GROUPS}
TABLE = nn.Embedding(3, 2)
MODEL: Any = SimpleNamespace(module=TABLE, named_parameters=lambda: [("table", TABLE.weight)])


def test_options_of_the_optimizer_are_the_settings_of_the_update_and_of_the_strategy() -> None:
    plain = {"ema_decay": None, "master": False, "offload": False, "host_weights": False}
    plain |= {"scaler": None, "first_rows": {}}
    assert context_of(ADAM, ema_decay=0.75).adamw_options(MODEL) == OPTIONS | plain
    context = context_of(ADAM, enable_ema=True, ema_decay=0.75, adam_offload=True, fp16=True)
    found = context.adamw_options(MODEL, master=True)
    given = {"ema_decay": 0.75, "master": True, "offload": True, "scaler": LossScaler()}
    assert found == OPTIONS | plain | given
    assert context_of(ADAM, amp=True, amp_dtype="fp16").adamw_options(MODEL)["scaler"] == LossScaler()
    assert context_of(ADAM, amp=True, amp_dtype="bf16").adamw_options(MODEL)["scaler"] is None
    assert context_of(ADAM).adamw_options(MODEL, first_rows={"m": 3})["first_rows"] == {"m": 3}
    with pytest.raises(AssertionError):
        context_of(None).adamw_options(MODEL)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({}, None), ({"use_mp_opt": True}, torch.bfloat16), ({"fp16": True}, torch.float16)],
)
def test_the_forward_is_as_narrow_as_the_settings_ask_for(settings: dict[str, Any], dtype: torch.dtype | None) -> None:
    assert narrow_dtype(StrategySettings(**settings)) == dtype
