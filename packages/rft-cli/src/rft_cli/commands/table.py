"""The program's own commands, a record each, and names of commands that are answered by a refusal."""

from __future__ import annotations

from dataclasses import asdict

from rft.config import commands
from rft.config.command_record import Command, Measure, TrainingRecord
from rft.config.refused_flags import Refusal

# settings that the short help shows, group by group
_TRAINED = """
pretrain bf16 device gradient_checkpointing lora_rank
prompt_data max_samples input_key apply_chat_template system_prompt eval_data
train_batch_size micro_train_batch_size max_steps max_epochs lr_schedule lr_warmup_ratio
fsdp zero_stage eval_steps save_path save_steps load_checkpoint nproc
seed run_name log_interval use_wandb use_tensorboard
"""
_OF_SFT = "output_key max_len packing_samples learning_rate held_out_rows patience"
_OF_DPO = """
chosen_key rejected_key loss_type beta label_smoothing reference_free rpo_alpha max_len learning_rate held_out_rows
patience
"""
_OF_RL = """
label_key reward reward_pretrain remote_rm_url advantage_estimator policy_loss eps_clip loss_agg_mode init_kl_coef
rollout_batch_size n_samples_per_prompt num_episodes temperature top_p prompt_max_len generate_max_len
engine_type actor_learning_rate
"""

SFT = Command(
    **asdict(commands.SFT),
    summary="train a model on demonstrations",
    essential=_TRAINED + _OF_SFT,
    training=TrainingRecord(
        purpose="train it on demonstrations",
        train="rft.stages.sft:train",
        check="rft.check:check_sft",
        workload="rft.planning.workload:SFT",
        plan_lines="rft_cli.pages.run_plan:sft_lines",
        models="rft_cli.pages.run_plan:trained_model_lines",
        next_commands="rft_cli.pages.advice:after_sft",
        measure=Measure(name="sft/loss", label="loss", less_is_better=True, digits=4),
        held_out=Measure(name="loss", less_is_better=True),
        line=(Measure(name="policy/gradient_norm", label="norm"),),
        curves="sft/loss policy/gradient_norm",
    ),
    stage_result="run",
)

PRETRAIN = Command(
    **asdict(commands.PRETRAIN),
    summary="train a language model on texts, from nothing or from a model",
    spellings="rft_cli.pretrainer.translation:spellings",
    nodes="rft_cli.pretrainer.nodes:nodes",
    help_tables="rft_cli.pretrainer.pages:field_table",
    essential="""
prompt_data eval_data held_out_share tokenizer tokenizer_size text_key
hidden_size num_layers num_heads max_seq_len use_moe num_experts top_k family depth
learning_rate max_epochs max_steps train_tokens train_batch_size train_batch_tokens micro_train_batch_size
lr_schedule lr_warmup_ratio bf16 device gradient_checkpointing fsdp zero_stage eval_steps save_path save_steps
load_checkpoint nproc seed run_name log_interval use_wandb use_tensorboard pretrain
""",
    training=TrainingRecord(
        purpose="go on with its pre-training, on texts",
        train="rft.pretraining.stage:train",
        check="rft.check:check_pretrain",
        workload="rft.planning.workload:SFT",
        prepare="rft.pretraining.new_decoder:with_decoder",
        fit="rft.pretraining.memory_fit:fitted",
        plan_lines="rft_cli.pages.pretraining.pretrain_plan:pretrain_lines",
        models="rft_cli.pages.run_plan:trained_model_lines",
        next_commands="rft_cli.pages.advice:after_pretrain",
        measure=Measure(name="sft/loss", label="loss", less_is_better=True, digits=4),
        held_out=Measure(name="loss", less_is_better=True),
        line=(Measure(name="policy/gradient_norm", label="norm"),),
        curves="sft/loss policy/gradient_norm",
    ),
    stage_result="run",
)

DPO = Command(
    **asdict(commands.DPO),
    summary="train a model on preferences between responses",
    essential=_TRAINED + _OF_DPO,
    training=TrainingRecord(
        purpose="train it on pairs of responses",
        train="rft.stages.dpo:train",
        check="rft.check:check_dpo",
        workload="rft.planning.workload:DPO",
        plan_lines="rft_cli.pages.run_plan:dpo_lines",
        models="rft_cli.pages.run_plan:trained_model_lines",
        next_commands="rft_cli.pages.advice:after_sft",
        measure=Measure(name="dpo/loss", label="loss", less_is_better=True, digits=4),
        held_out=Measure(name="accuracy", is_share=True),
        line=(
            Measure(name="dpo/accuracy", label="accuracy"),
            Measure(name="dpo/margin", label="margin"),
            Measure(name="policy/gradient_norm", label="norm"),
        ),
        curves="dpo/loss dpo/accuracy dpo/margin dpo/chosen_reward dpo/rejected_reward policy/gradient_norm",
    ),
    stage_result="run",
)

RM = Command(
    **asdict(commands.RM),
    summary="train a reward model on pairs of responses",
    essential="""
pretrain bf16 device gradient_checkpointing heads_types pooling_method
prompt_data max_samples input_key chosen_key rejected_key margin_key eval_data held_out_rows
loss_type margin center_rewards_coefficient learning_rate max_len packing_samples patience
train_batch_size micro_train_batch_size max_steps max_epochs lr_schedule lr_warmup_ratio
fsdp eval_steps save_path save_steps load_checkpoint nproc seed run_name log_interval use_wandb use_tensorboard
""",
    training=TrainingRecord(
        purpose="train a reward model from it, on pairs of responses",
        train="rft.stages.rm:train",
        check="rft.check:check_rm",
        workload="rft.planning.workload:RM",
        plan_lines="rft_cli.pages.preferences.reward_plan:rm_lines",
        models="rft_cli.pages.preferences.reward_plan:rm_model_lines",
        next_commands="rft_cli.pages.advice:after_rm",
        measure=Measure(name="rm/accuracy", label="accuracy", is_share=True),
        held_out=Measure(name="accuracy", is_share=True),
        line=(
            Measure(name="rm/loss", label="loss", less_is_better=True, digits=4),
            Measure(name="rm/margin", label="margin", digits=3),
            Measure(name="policy/gradient_norm", label="norm"),
        ),
        curves="rm/accuracy rm/loss rm/margin rm/chosen rm/rejected policy/gradient_norm",
    ),
    stage_result="run",
)

RL = Command(
    **asdict(commands.RL),
    is_default=True,
    summary="train a policy on rewards of its own responses",
    essential=_TRAINED + _OF_RL,
    help_tables="rft_cli.pages.algorithms:algorithm_table",
    training=TrainingRecord(
        purpose="train it on rewards of its own responses",
        train="rft.stages.rl:train",
        check="rft.check:check_rl",
        workload="rft.planning.workload:RL",
        plan_lines="rft_cli.pages.run_plan:rl_lines",
        models="rft_cli.pages.run_plan:rl_model_lines",
        next_commands="rft_cli.pages.advice:after_rl",
        measure=Measure(name="reward/mean", label="reward"),
        held_out=Measure(name="accuracy", is_share=True),
        line=(
            Measure(name="reward/groups_with_signal", label="signal", digits=2),
            Measure(name="policy/kl", label="kl", digits=4),
            Measure(name="kl/reference", label="ref_kl", digits=4),
            Measure(name="policy/clip_fraction", label="clip"),
            Measure(name="policy/entropy", label="entropy"),
            Measure(name="policy/gradient_norm", label="norm"),
            Measure(name="critic/loss", label="v_loss", digits=4),
            Measure(name="critic/explained_variance", label="v_explained", digits=2),
            Measure(name="completion/length_mean", label="length", digits=1),
            Measure(name="completion/truncated_share", label="cut", digits=2),
        ),
        curves="reward/mean reward/groups_with_signal kl/reference policy/entropy completion/length_mean "
        "policy/gradient_norm",
    ),
    stage_result="run",
)

BUILT_IN = (
    Command(
        name="quickstart",
        summary="see reinforcement fine-tuning work, on a CPU, without a download",
        run="rft_cli.commands.quickstart.command:run",
        trains=True,
    ),
    SFT,
    PRETRAIN,
    DPO,
    RM,
    RL,
    Command(
        **asdict(commands.RM_TEST),
        summary="test a reward model on pairs of responses",
        run="rft_cli.commands.rm_test:run",
        stage_result="output",
    ),
    Command(
        **asdict(commands.EVAL),
        summary="score a model on held-out data",
        run="rft_cli.commands.eval:run",
        switches=(("--perplexity", commands.PERPLEXITY.name),),
        takes_run=True,
        stage_result="output",
    ),
    Command(
        **asdict(commands.PERPLEXITY),
        summary="measure how well a model predicts texts",
        run="rft_cli.commands.texts.perplexity:run",
        takes_run=True,
    ),
    Command(
        **asdict(commands.SERVE_REWARD),
        summary="answer requests for rewards over HTTP",
        run="rft_cli.commands.serve_reward:run",
    ),
    Command(
        **asdict(commands.GENERATE),
        summary="answer prompts with a model",
        run="rft_cli.commands.generate:run",
        takes_run=True,
        stage_result="output",
    ),
    Command(
        **asdict(commands.CONFORMANCE),
        summary="compare engines with the trainer, token by token",
        run="rft_cli.commands.conformance:run",
    ),
    Command(
        **asdict(commands.DOCTOR),
        summary="examine the installation and this machine, with what mends each fault",
        act="rft.doctor.examination:lines",
    ),
    Command(
        **asdict(commands.BUILD),
        summary="create a small model and its tokenizer from scratch",
        run="rft_cli.commands.build:run",
        stage_result="model",
    ),
    Command(
        **asdict(commands.TOKENIZER),
        summary="learn a tokenizer from texts",
        run="rft_cli.commands.texts.tokenizer:run",
        stage_result="tokenizer",
    ),
    Command(
        name="export",
        summary="write the model of a checkpoint as a Hugging Face directory",
        run="rft_cli.commands.export:run",
    ),
    Command(
        name="resume",
        summary="continue a run from its newest checkpoint",
        run="rft_cli.commands.resume:run",
        trains=True,
    ),
    Command(
        name="check",
        summary="show what a command would do, without starting it",
        run="rft_cli.commands.check:run",
    ),
    Command(
        name="plan",
        summary="compute ranks, batches and memory of a run for machines that are elsewhere",
        run="rft_cli.commands.plan:run",
    ),
    Command(name="runs", summary="list runs, or show one", run="rft_cli.commands.runs:run"),
    Command(
        **asdict(commands.REPORT),
        summary="write a page on a run: outcome, curves, times, samples",
        act="rft.report.written:lines",
        first_word="run",
    ),
    Command(
        **asdict(commands.DASHBOARD),
        summary="show running and past runs in a browser: curves, times, samples, comparisons",
        act="rft.dashboard.served:lines",
        first_word="folders",
        takes_words=True,
    ),
    Command(
        name="rollouts",
        summary="list, compare and export the sampled answers of a run",
        run="rft_cli.commands.answers.listing:run",
    ),
    Command(
        name="recipes",
        summary="list, show or copy configurations that are known to work",
        run="rft_cli.commands.recipes:run",
        trains=True,
    ),
)

_NOT_YET = "not in this version"

_ALGORITHMS = ("grpo", "dapo", "dr_grpo", "gspo", "rloo", "ppo")
"""Names of `--advantage_estimator` that other programs have a command for."""

REFUSED_COMMANDS: dict[str, Refusal] = {
    "reward": Refusal("it has another name", "rft-train rm"),
    **{
        name: Refusal("it is a loss of dpo", f"rft-train dpo --loss_type {name}")
        for name in ("kto", "orpo", "ipo", "simpo", "cpo")
    },
    "cdpo": Refusal("it is dpo with smoothed labels", "rft-train dpo --label_smoothing 0.1"),
    "compare": Refusal("it is a page of another command", "rft-train dashboard"),
    "distill": Refusal(_NOT_YET, "rft-train sft"),
    "merge": Refusal("it has another name", "rft-train export"),
    **{name: Refusal("it is an algorithm", f"rft-train rl --advantage_estimator {name}") for name in _ALGORITHMS},
    **{name: Refusal("it has another name", "rft-train generate") for name in ("infer", "inference", "predict")},
    "train": Refusal("it has another name", "rft-train rl"),
    "test": Refusal("it has another name", "rft-train eval"),
}
