"""Stand-ins for TRL's trainers: what their methods read, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer


def accelerator() -> Any:
    """One process: gathering and reducing give back what they are given."""
    same = lambda values, **_: values  # noqa: E731
    return SimpleNamespace(
        device=torch.device("cpu"),
        process_index=0,
        num_processes=1,
        sync_gradients=True,
        gather=same,
        gather_for_metrics=same,
        reduce=same,
    )


def trainer(**fields: Any) -> Any:
    """What every trainer has."""
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    common: dict[str, Any] = {
        "accelerator": accelerator(),
        "model": model,
        "_metrics": {"train": defaultdict(list)},
        "aux_loss_enabled": False,
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**(common | fields))


# from rollouts to advantages and importance weights


def scored(kind: Any, components: Tensor, size: int, completions: list[list[int]], **fields: Any) -> dict[str, Any]:
    """The batch that a trainer makes of rollouts with these rewards [N, K]."""
    count, parts = components.shape
    logs = defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)}
    generated: dict[Any, Any] = {
        GRPOTrainer: ([[1]] * count, completions, fields.pop("tool_mask", None), [""] * count, None, {}, None, None),
        RLOOTrainer: ([[1]] * count, completions, [""] * count),
    }
    sampled = fields.pop("sampling_logps", None)
    made = list(generated[kind])
    if sampled is not None:
        made[4] = sampled
    options: dict[str, Any] = {
        "args": SimpleNamespace(
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            per_device_train_batch_size=count,
            gradient_checkpointing_kwargs=None,
        ),
        "environment_factories": None,
        "tools": None,
        "environments": None,
        "_generate": lambda prompts: tuple(made),
        "_calculate_rewards": lambda *_: components,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (
            torch.zeros(count, max(map(len, completions)), dtype=components.dtype),
            None,
            None,
        ),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "num_iterations": 1,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "beta": 0.0,
        "num_generations": size,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "normalize_advantages": False,
        "reward_clip_range": None,
        "reward_weights": torch.ones(parts, dtype=components.dtype),
        "reward_funcs": [None] * parts,
        "reward_func_names": [str(k) for k in range(parts)],
        "_logs": logs,
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "log_multimodal": False,
    }
    stand_in = trainer(**(options | fields))
    return kind._generate_and_score_completions(stand_in, [{"prompt": "p"} for _ in range(count)])


# from log-probabilities to the loss

LOSS_TYPES = {
    "token_mean": "dapo",
    "sequence_mean_token_mean": "grpo",
    "sequence_mean_token_sum": "luspo",
    "fixed_length": "dr_grpo",
}


def policy_loss(
    now_BT: Tensor, inputs: dict[str, Any], kind: Any = GRPOTrainer, parts: int = 1, **fields: Any
) -> Tensor:
    """`_compute_loss` of one of `parts` micro-batches."""
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "steps_per_generation": parts,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")),
    }
    arguments |= {key: fields.pop(key) for key in list(fields) if key in arguments}
    options: dict[str, Any] = {
        "args": SimpleNamespace(**arguments),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (now_BT, torch.zeros_like(now_BT), None),
        "get_gamma_weights": GRPOTrainer.get_gamma_weights,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": "importance_sampling_ratio" in inputs,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": parts,
        "_entropy_bonus_enabled": False,
    }
    ids = torch.ones(now_BT.shape, dtype=torch.long)
    given = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids}
    return kind._compute_loss(trainer(**(options | fields)), None, given | inputs)
