"""Engine and trainer of a mixture of experts choose the same experts, and a router that differs shows."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_models.decode.weight_copy import GenerationCopy
from rft_models.policy.load import make_policy
from rft_trainer.health.history import History
from rft_trainer.health.training_detectors import ENGINE
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.scoring.router_agreement import RouterAgreement
from rft_trainer.testing.bigram import OneRank


def mixtral() -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def sampled() -> list[RolloutGroup]:
    tokens = torch.randint(0, 40, (2, 30), generator=torch.Generator().manual_seed(1)).tolist()
    made = []
    for row in tokens:
        ids = tuple(row[10:])
        zeros = (0.0,) * len(ids)
        rollout = Rollout("p", 0, ids, zeros, zeros, "stop", 0, "x", 1.0, RewardStatus.OK)
        made.append(RolloutGroup(Prompt("p", tuple(row[:10]), "p", None, "p"), 0, 0, (rollout,)))
    return made


def test_agreement_is_whole_with_equal_weights_and_falls_with_a_router_of_the_engine() -> None:
    policy = make_policy(mixtral(), None, packed=True)
    engine = NativeEngineOnCopy(GenerationCopy(policy), policy.named_parameters, max_rows=4, max_len=64)
    engine.refresh()
    measure = RouterAgreement(policy, engine, OneRank())
    groups = sampled()
    assert measure(1, groups) == {"engine/router_agreement": 1.0}
    gates = [tensor for name, tensor in engine._copy.named_tensors() if "gate.weight" in name]
    assert len(gates) == 2
    found = []
    for size in (0.02, 1.0):
        with torch.no_grad():
            gates[1].add_(size * torch.randn(gates[1].shape, generator=torch.Generator().manual_seed(2)))
        found.append(measure(1, groups)["engine/router_agreement"])
    assert 0.5 < found[1] < found[0] <= 1.0, "one layer of two differs"
    assert found[1] < 0.9
    (detector,) = [detector for detector in ENGINE if detector.name == "router_gap"]
    history = History("rl")
    history.add({"engine/router_agreement": found[1]})
    result = detector.rule(history, detector.window, detector.threshold)
    assert result is not None
    said = detector.says.format(value=result.value, detail="", window=1, threshold=0.9)
    assert said.startswith(f"engine and trainer choose the same experts for {found[1]:.0%} of tokens and layers")
