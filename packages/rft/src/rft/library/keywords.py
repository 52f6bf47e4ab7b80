"""Keyword arguments of the calls of `rft` that train, evaluate, generate and serve: settings by name.

Generated from the code by `ci/generate_reference.py`; what each means is in docs/reference.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from rft_algos.algorithms.preference import PreferenceLossType


class TrainingKeywords(TypedDict, total=False):
    """Settings of every training."""

    bf16: bool
    model_code: str
    device: Literal["auto", "cpu", "cuda"]
    gradient_checkpointing: bool
    gradient_checkpointing_mode: Literal["full", "selective"]
    gradient_checkpointing_every: int
    flash_attn: bool
    prompt_data_probs: str
    prompt_split: str
    max_samples: int
    num_workers: int
    prefetch_factor: int
    dataloader_pin_memory: bool
    input_key: str
    eval_split: str
    max_eval_samples: int
    train_batch_size: int
    micro_train_batch_size: int
    max_tokens_per_micro_batch: int
    packing_samples: bool
    max_epochs: int
    max_steps: int
    max_len: int | None
    lr_warmup_ratio: float
    lr_schedule: Literal["cosine", "linear", "constant"]
    min_lr_ratio: float
    adam_betas: tuple[float, float]
    adam_epsilon: float
    l2: float
    lr_factors: str
    l2_factors: str
    max_norm: float
    fsdp: bool
    shard_size: int | None
    fsdp_cpu_offload: bool
    zero_stage: int
    zpg: int
    overlap_comm: bool
    sp_size: int
    sp_mode: Literal["auto", "ulysses", "ring"]
    tp_size: int
    adam_offload: bool
    use_mp_opt: bool
    fp16: bool
    meta_init: bool
    enable_ema: bool
    ema_decay: float
    eval_steps: int
    save_path: str
    save_steps: int
    save_interval: int
    save_minutes: float
    load_checkpoint: bool
    ckpt_path: str
    ckpt_weights_only: bool
    ckpt_partial: str
    accept_changes: str
    max_ckpt_num: int
    max_ckpt_mem: int
    save_model_only: bool
    async_save: bool
    seed: int
    debug: bool
    run_name: str
    log_interval: int
    max_refused_steps: int
    max_rows_set_aside: int
    max_rollbacks: int
    max_norm_spike: float
    weight_check_steps: int
    use_wandb: str | bool
    wandb_org: str
    wandb_group: str
    wandb_run_name: str
    use_tensorboard: str | bool
    use_trackio: str | bool
    nproc: int
    watchdog_seconds: float
    watchdog_first_seconds: float
    watchdog_collective_seconds: float
    heartbeat_seconds: float
    fingerprint_steps: int


class PolicyKeywords(TrainingKeywords, total=False):
    """Settings of a policy's training."""

    freeze_prefix: str | bool
    train_only_tokens_from: int
    aux_loss_coef: float
    fused_linear_logprob: bool
    chunk_size: int
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    target_modules: str
    lora_type: Literal["lora", "rslora", "dora"]
    load_in_4bit: bool
    input_template: str
    apply_chat_template: bool
    system_prompt: str
    eval_input_key: str
    images_key: str
    limit_mm_image_per_prompt: int
    mixed_mm_data: bool
    max_pixels: int
    min_pixels: int
    shuffle_images: bool


class RewardKeywords(TypedDict, total=False):
    """Settings of everything that scores responses."""

    reward_workers: int
    reward_timeout: float
    reward_memory: float
    reward_variables: str
    code_seconds: int
    code_memory: float
    reward_weights: str
    reward_routes: str
    reward_source_key: str
    number_tolerance: float
    number_relative_tolerance: float
    fuzzy_measure: Literal["f1", "ratio"]
    choice_options_key: str
    format_tags: str
    response_pattern: str
    response_pattern_match: Literal["search", "full"]
    length_range: tuple[int, int]
    length_slack: int
    length_unit: Literal["tokens", "characters"]
    response_language: Literal[
        "",
        "en",
        "de",
        "fr",
        "es",
        "it",
        "pt",
        "nl",
        "zh",
        "ja",
        "ko",
        "ru",
        "el",
        "ar",
        "he",
        "hi",
        "th",
    ]
    json_schema: str
    reward_pretrain: str
    reward_offload: Literal["auto", "held", "phase"]
    reward_batch_tokens: int
    remote_rm_url: str
    remote_rm_timeout: float
    remote_rm_batch_size: int
    remote_rm_concurrency: int
    remote_rm_retries: int
    reward_wait: float
    on_reward_outage: Literal["stop", "unscored"]
    judge_pretrain: str
    judge_url: str
    judge_model: str
    judge_template: str
    task_instruction: str
    judge_pattern: str
    judge_range: tuple[float, float]
    judge_max_new_tokens: int


class AnswerKeywords(TypedDict, total=False):
    """Settings of everything that samples responses."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    prompt_max_len: int
    generate_max_len: int
    constraint: str
    engine_type: Literal["auto", "native", "hf", "vllm", "sglang"]
    engine_tp_size: int
    engine_mem_util: float | None
    engine_fp8: bool
    engine_max_rows: int
    engine_enforce_eager: bool


class RlKeywords(PolicyKeywords, RewardKeywords, AnswerKeywords, total=False):
    """Settings of `rft-train rl`."""

    label_key: str
    eval_metrics: str
    eval_label_key: str
    shuffle_rewards: bool
    environment: str
    environment_workers: int
    environment_memory: float
    environment_variables: str
    max_turns: int
    turn_max_len: int | None
    tool_timeout: float
    rollout_timeout: float
    tool_call_pattern: str
    turn_gamma: float | None
    policy_loss: (
        Literal[
            "ppo",
            "dual_clip",
            "gspo",
            "gspo_token",
            "gmpo",
            "cispo",
            "sapo",
            "cpgd",
            "reinforce",
            "importance_weighted",
            "dppo_tv",
            "dppo_kl",
            "clip_cov",
            "kl_cov",
            "kimi",
            "dro",
            "vespo",
            "topr",
        ]
        | None
    )
    use_gspo: bool
    use_gmpo: bool
    use_cpg_loss: bool
    eps_clip: float | None
    eps_clip_high: float | None
    dual_clip: float | None
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None
    high_entropy_token_ratio: float
    entropy_coef: float | None
    entropy_target: float | None
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "unbiased_k3", "importance_weighted_k1"] | None
    init_kl_coef: float | None
    use_kl_loss: bool | None
    kl_target: float | None
    kl_horizon: int
    max_logprob_gap: float
    off_policy_correction: (
        Literal[
            "off",
            "tis",
            "seq-tis",
            "geo-tis",
            "mis",
            "icepop",
            "seq-mis",
            "geo-mis",
            "m2po",
        ]
        | None
    )
    off_policy_cap: float
    off_policy_low: float | None
    off_policy_high: float | None
    off_policy_limit: float | None
    off_policy_veto: float | None
    off_policy_normalize: bool
    off_policy_delta: float | None
    advantage_estimator: str
    gamma: float | None
    lambd: float | None
    lambd_value: float | None
    length_alpha: float | None
    pass_k: int | None
    advantages_norm: bool | None
    advantage_clip: float
    reward_running_norm: bool
    reward_running_norm_minus_mean: bool
    reward_clip: float
    overlong_buffer: bool | None
    overlong_buffer_len: int | None
    overlong_buffer_penalty_factor: float
    length_penalty: bool
    mask_truncated_completions: bool
    dynamic_sampling: bool | None
    dynamic_sampling_rounds: int
    filter_groups: bool
    teacher_pretrain: str
    teacher_kl_coef: float
    critic_pretrain: str
    critic_learning_rate: float
    value_clip: float
    value_head_prefix: str
    save_value_network: bool
    freezing_actor_steps: int
    pretrain_data: str
    pretrain_data_probs: str
    pretrain_split: str
    pretrain_input_key: str
    pretrain_output_key: str
    pretrain_text_key: str
    ptx_coef: float
    rollout_batch_size: int
    n_samples_per_prompt: int
    micro_rollout_batch_size: int
    num_episodes: int
    use_fire: bool
    first_token_temperature: float
    enable_engine_sleep: bool
    engine_replicas: int
    max_staleness: int
    async_deterministic: bool
    actor_learning_rate: float
    eval_n: int
    eval_k: str
    eval_temperature: float
    keep_best: bool
    save_trajectories: bool
    num_trajectories_to_save: int
    rollout_log_interval: int
    token_records: Literal["shown", "all", "off"]
    token_records_mib: float
    max_unscored_share: float


class SftKeywords(PolicyKeywords, total=False):
    """Settings of `rft-train sft`."""

    output_key: str
    eval_output_key: str
    weight_key: str
    data_store: Literal["auto", "on", "off"]
    data_store_path: str
    train_on_turns: Literal["all", "last"]
    roles_to_train: str
    held_out_rows: int
    learning_rate: float
    patience: int
    min_improvement: float
    target_loss: float
    label_smoothing: float
    z_loss_coef: float
    neftune_noise_alpha: float


class DpoKeywords(PolicyKeywords, total=False):
    """Settings of `rft-train dpo`."""

    chosen_key: str
    rejected_key: str
    weight_key: str
    margin_key: str
    completion_key: str
    label_key: str
    held_out_rows: int
    loss_type: PreferenceLossType
    loss_weights: str
    reference_pretrain: str
    beta: float | None
    label_smoothing: float
    reference_free: bool
    f_divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon", "alpha"]
    f_alpha: float
    simpo_gamma: float
    cpo_alpha: float
    discopop_tau: float
    desirable_weight: float
    undesirable_weight: float
    ld_alpha: float
    use_weighting: bool
    rpo_alpha: float
    learning_rate: float
    patience: int
    min_improvement: float
    target_loss: float


class RmKeywords(TrainingKeywords, total=False):
    """Settings of `rft-train rm`."""

    heads_types: str
    heads_weights: str
    pooling_method: Literal["last", "attn"]
    probing_layer: int
    scale_for_train: bool
    chosen_key: str
    rejected_key: str
    outcome_key: str
    margin_key: str
    weight_key: str
    held_out_rows: int
    loss_type: Literal["sigmoid", "hps", "logexp"]
    margin: float
    tie_margin: float
    center_rewards_coefficient: float
    learning_rate: float
    patience: int
    min_improvement: float


class EvalKeywords(RewardKeywords, AnswerKeywords, total=False):
    """Settings of `rft-train eval`."""

    bf16: bool
    model_code: str
    device: Literal["auto", "cpu", "cuda"]
    input_key: str
    input_template: str
    apply_chat_template: bool
    system_prompt: str
    eval_split: str
    max_eval_samples: int
    label_key: str
    eval_metrics: str
    images_key: str
    limit_mm_image_per_prompt: int
    mixed_mm_data: bool
    max_pixels: int
    min_pixels: int
    shuffle_images: bool
    environment: str
    environment_workers: int
    environment_memory: float
    environment_variables: str
    max_turns: int
    turn_max_len: int | None
    tool_timeout: float
    rollout_timeout: float
    tool_call_pattern: str
    max_len: int | None
    eval_n: int
    eval_k: str
    seed: int
    debug: bool
    output: str
    eval_by: str


class GenerateKeywords(AnswerKeywords, total=False):
    """Settings of `rft-train generate`."""

    bf16: bool
    model_code: str
    device: Literal["auto", "cpu", "cuda"]
    input_key: str
    input_template: str
    apply_chat_template: bool
    system_prompt: str
    prompt_split: str
    max_samples: int
    n_samples_per_prompt: int
    images_key: str
    limit_mm_image_per_prompt: int
    mixed_mm_data: bool
    max_pixels: int
    min_pixels: int
    image: str
    max_len: int | None
    seed: int
    debug: bool
    output: str


class ServeRewardKeywords(RewardKeywords, total=False):
    """Settings of `rft-train serve-reward`."""

    host: str
    port: int
    reward_columns: str
    reward_log: str
    serve_batch_size: int
    max_waiting_requests: int
    max_request_mib: float
    max_request_responses: int
    request_read_timeout: float
    bf16: bool
    device: Literal["auto", "cpu", "cuda"]
