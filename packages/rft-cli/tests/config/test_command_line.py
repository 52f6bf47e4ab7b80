"""Flags: their forms, what is refused, and what is suggested for a name that does not exist."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from pathlib import Path

import pytest

from rft.build.algorithm import algorithm_record
from rft.config.errors import SettingsError
from rft.config.names import ALIASES, OPPOSITES
from rft.config.other_names import OTHER_NAMES
from rft.config.refused_flags import REFUSED_FLAGS
from rft.config.schema import schema
from rft.settings import RlSettings
from rft_cli.config.resolve import resolve
from rft_cli.records.discovery import with_settings
from rft_core.errors import Problem
from rft_core.nearest_names import nearest_names

NeededWords = Callable[..., list[str]]

NAMED = sorted(set((Path(__file__).parent / "named_flags.txt").read_text().replace("--", "").split()))

WITH_EXAMPLES = """--actor_learning_rate 1e-6|--adam_offload|--advantage_estimator cpgd|--advantages_norm|--bf16
--ckpt_path PATH|--dataloader_pin_memory|--disable_engine_sleep|--enable_engine_sleep|--engine_mem_util 0.5
--engine_tp_size 2|--engine_type vllm|--flash_attn|--fsdp|--fsdp_cpu_offload|--fused_linear_logprob
--gradient_checkpointing|--init_kl_coef 0.01|--kl_target 0.01|--load_checkpoint|--log_interval 100
--max_ckpt_mem 1000|--max_ckpt_num 3|--max_len 2048|--max_norm 1.0|--micro_rollout_batch_size 2
--micro_train_batch_size 1|--mixed_mm_data|--n_samples_per_prompt 8|--num_workers 8|--packing_samples
--prefetch_factor 2|--pretrain PATH|--prompt_max_len 1024|--reward_clip 10.0|--reward_running_norm
--reward_running_norm_minus_mean|--rollout_batch_size 64|--save_interval 1|--save_path PATH|--sp_size 2
--train_batch_size 512|--use_mp_opt|--use_wandb PROJECT|--wandb_org ORG|--wandb_run_name NAME|--zero_stage 3"""
"""The 47 flags of the guides, each with the value that the guides show."""

REFUSED_HERE: set[str] = set()


def problems_of(*argv: str, command: str = "rl", pretrain: bool = True) -> tuple[Problem, ...]:
    with pytest.raises(SettingsError) as caught:
        resolve(command, ["--pretrain", "model", *argv] if pretrain else list(argv))
    return caught.value.problems


def values_of(*argv: str, command: str = "rl") -> dict[str, object]:
    return resolve(command, ["--pretrain", "model", *argv]).values


@pytest.mark.parametrize("words", [line.split() for line in WITH_EXAMPLES.replace("|", "\n").splitlines()], ids=str)
def test_each_flag_of_the_guides_works_or_says_why_not(words: list[str]) -> None:
    name = words[0].removeprefix("--")
    if name in REFUSED_HERE:
        (problem,) = problems_of(*words)
        assert name in problem.what
        assert problem.why
        assert problem.do
    else:
        target = OPPOSITES.get(name, name)
        assert resolve("rl", ["--pretrain", "model", *words]).origins[target].kind == "command line"


def test_the_guides_name_47_flags() -> None:
    assert len(WITH_EXAMPLES.replace("|", "\n").splitlines()) == 47


@pytest.mark.parametrize("name", NAMED)
def test_every_flag_of_lightrft_is_known(name: str) -> None:
    accepted = {row for command in with_settings() for row in schema(command)} | set(ALIASES) | set(OPPOSITES)
    assert name in accepted or name in REFUSED_FLAGS
    if name not in accepted:
        (problem,) = problems_of(f"--{name}", "1")
        assert problem.code == "option.refused"
        assert f"--{name}" in problem.what
        assert len(problem.what) > len(f"--{name} cannot be used: ")
        assert problem.do


def test_a_refused_name_does_not_point_to_a_flag_that_is_refused_too() -> None:
    accepted = {row for command in with_settings() for row in schema(command)} | {"config"}
    for refusal in REFUSED_FLAGS.values():
        if not refusal.do.startswith(("torchrun", "python ")):
            flags = [word.lstrip("-") for word in refusal.do.split() if word.startswith("--")]
            assert set(flags) <= accepted, refusal.do


@pytest.mark.parametrize(
    "name",
    [
        "gae",
        "reinforce",
        "rloo",
        "reinforce_baseline",
        "reinforce++",
        "group_norm",
        "grpo",
        "dr_grpo",
        "gspo",
        "gmpo",
        "cpgd",
        "remax",
        "opo",
    ],
)
def test_every_algorithm_of_the_guides_is_selected_by_its_name(name: str) -> None:
    settings = resolve("rl", ["--pretrain", "model", "--advantage_estimator", name]).settings
    assert isinstance(settings, RlSettings)
    assert algorithm_record(settings).name == {"group_norm": "grpo"}.get(name, name)


@pytest.mark.parametrize(
    ("words", "do"),
    [
        # names of other trainers lead to the setting of the same meaning
        ("--lr 1e-6", "--actor_learning_rate 1e-6"),
        ("--actor_lr 1e-6", "--actor_learning_rate 1e-6"),
        ("--cutoff_len 4096", "--max_len 4096"),
        ("--template qwen", "--apply_chat_template"),
        ("--epsilon 0.2", "--eps_clip 0.2"),
        ("--num_train_epochs 3", "--num_episodes 3"),
        ("--weight_decay 0.1", "--l2 0.1"),
        ("--group_size 8", "--n_samples_per_prompt 8"),
        ("--num_gpus 2", "--nproc 2"),
        ("--reward_model r", "--reward_pretrain r"),
        ("--algorithm grpo", "--advantage_estimator grpo"),
        ("--loss_type dr_grpo", "--advantage_estimator dr_grpo"),
        ("--model_name_or_path m2", "--pretrain m2"),
        ("--torch_dtype bfloat16", "--bf16"),
        ("--report_to wandb", "--use_wandb"),
        ("algorithm.adv_estimator=rloo", "--advantage_estimator rloo"),
        ("data.train_batch_size=64", "--rollout_batch_size 64"),
        ("+trainer.total_epochs=2", "--num_episodes 2"),
        ("max_steps=5", "--max_steps 5"),
    ],
)
def test_a_name_of_another_trainer_leads_to_a_flag_that_is_accepted(words: str, do: str) -> None:
    (problem,) = problems_of(*words.split())
    assert problem.do == do
    resolve("rl", ["--pretrain", "m", *problem.do.split()])


def test_a_gpu_is_meant_as_cuda() -> None:
    (problem,) = problems_of("--device", "gpu")
    assert problem.do == "--device cuda"


@pytest.mark.parametrize("dash", ["\u2013", "\u2014", "\u2013-", "\u2212\u2212"])
def test_a_dash_of_a_text_program_is_told_as_such(dash: str) -> None:
    problems = problems_of(f"{dash}max_steps", "3")
    assert [problem.do for problem in problems if "dash" in problem.why] == ["--max_steps"]


@pytest.mark.parametrize(
    "words",
    ["--eval_top_k 4", "--log_level debug", "--ckpt x", "--generation_batch_size 8", "a.b=3"],
)
def test_a_guess_is_not_given_as_the_thing_to_do(words: str) -> None:
    (problem,) = problems_of(*words.split())
    assert problem.do == "rft-train rl --help"


def test_every_name_elsewhere_stands_for_a_setting_and_is_none_itself() -> None:
    settings = {row for command in with_settings() for row in schema(command)}
    assert {target for targets in OTHER_NAMES.values() for target in targets} <= settings
    assert not (OTHER_NAMES.keys() & REFUSED_FLAGS.keys())
    assert not OTHER_NAMES.keys() & schema("rl").keys() - {"actor_learning_rate", "prompt_data"}


@pytest.mark.parametrize("name", ["prompt_data", "dataset"])
def test_data_of_a_command_that_does_not_train_are_its_held_out_data(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("eval", ["--pretrain", "m", f"--{name}", "rows.jsonl"])
    assert caught.value.problem.do == "--eval_data rows.jsonl"


def test_an_algorithm_that_nobody_knows_is_refused_with_the_nearest() -> None:
    (problem,) = problems_of("--advantage_estimator", "gropo")
    assert problem.do == "--advantage_estimator grpo"
    assert "gropo" in problem.what


@pytest.mark.parametrize("flag", ["--grad-accum-dtype", "--grad_accum_dtype", "--no-shard-vit", "--no_shard_vit"])
def test_dashes_and_underscores_are_alike(flag: str) -> None:
    assert problems_of(flag, "1")[0].code == "option.refused"
    assert values_of("--n-samples-per-prompt", "4", "--max_len=2048")["n_samples_per_prompt"] == 4


# --- booleans


@pytest.mark.parametrize("form", ["--{}", "--{} true", "--{} True", "--{} yes", "--{} 1", "--{}=true", "--{}=YES"])
@pytest.mark.parametrize("name", ["bf16", "packing-samples", "use_kl_loss", "enable_engine_sleep"])
def test_a_switch_can_be_put_on(name: str, form: str) -> None:
    target = name.replace("-", "_")
    argv = form.format(name).split()
    values = values_of(*argv, "--init_kl_coef", "0.1")
    assert values[target] is True


@pytest.mark.parametrize("form", ["--no-{}", "--no_{}", "--{} false", "--{} FALSE", "--{} no", "--{} 0", "--{}=0"])
@pytest.mark.parametrize("name", ["bf16", "packing-samples", "use_kl_loss", "enable_engine_sleep"])
def test_a_switch_can_be_put_off(name: str, form: str) -> None:
    target = name.replace("-", "_")
    assert values_of(f"--{name}", "--init_kl_coef", "0.1", *form.format(name).split())[target] is False


@pytest.mark.parametrize("text", ["maybe", "on", "off", "2", "t", "y", "", "truee", "None", "-1"])
def test_another_word_after_a_switch_is_refused_with_the_forms_that_are_not(text: str) -> None:
    (problem,) = problems_of("--bf16", text)
    assert "--bf16" in problem.what
    assert "true, false, yes, no, 1, 0" in problem.what


@pytest.mark.parametrize("command", with_settings())
def test_every_switch_can_be_turned_off_by_its_own_name(command: str, needed_words: NeededWords) -> None:
    for name, row in schema(command).items():
        if row.is_switch:
            words = [word for word in needed_words(command) if word != f"--{name}"]
            more = ["--histories", "h", "--recommendations", "r"] if name == "serve" else []
            assert resolve(command, [*words, *more, f"--no-{name}"]).values[name] is False


def test_a_negated_switch_takes_no_value() -> None:
    (problem,) = problems_of("--no-bf16", "true")
    assert problem.do == "--bf16 false"


@pytest.mark.parametrize(("words", "expected"), [([], False), (["true"], False), (["false"], True), (["0"], True)])
def test_disable_engine_sleep_is_the_contrary_of_enable_engine_sleep(words: list[str], expected: bool) -> None:
    assert values_of("--disable_engine_sleep", *words)["enable_engine_sleep"] is expected


# --- values


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--top_k", "-1"], "top_k", -1),
        (["--top_k=-1"], "top_k", -1),
        (["--max_samples", "1e6"], "max_samples", 1_000_000),
        (["--actor_learning_rate", "1e-5"], "actor_learning_rate", 1e-5),
        (["--adam_betas", "0.8", "0.99"], "adam_betas", (0.8, 0.99)),
        (["--adam_betas", "0.8,0.99"], "adam_betas", (0.8, 0.99)),
        (["--eps_clip_high", "0.3"], "eps_clip_high", 0.3),
        (["--eps_clip_high", "none"], "eps_clip_high", None),
        (["--use_wandb"], "use_wandb", "rft"),
        (["--use_wandb", "sums"], "use_wandb", "sums"),
        (["--logging_steps", "7"], "log_interval", 7),
        (["--system_prompt=--be brief--", "--apply_chat_template"], "system_prompt", "--be brief--"),
        (["--run_name", "7"], "run_name", "7"),
        (["--seed", "1", "--seed", "2"], "seed", 2),
    ],
)
def test_values_are_read_as_people_write_them(argv: list[str], name: str, value: object) -> None:
    assert values_of(*argv)[name] == value


@pytest.mark.parametrize(
    ("argv", "allowed", "remedy"),
    [
        (["--n_samples_per_prompt", "1.5"], "a whole number of at least 1", "--n_samples_per_prompt 2"),
        (["--rollout_batch_size", "0"], "a whole number of at least 1", "--rollout_batch_size 1"),
        (["--n_samples_per_prompt", "many"], "a whole number of at least 1", "--n_samples_per_prompt 8"),
        (["--top_p", "0"], "a number above 0 and at most 1", "--top_p 1"),
        (["--top_p", "1.5"], "a number above 0 and at most 1", "--top_p 1"),
        (["--temperature", "nan"], "a number of at least 0", "--temperature 1"),
        (["--actor_learning_rate", "inf"], "a number above 0", "--actor_learning_rate 1e-06"),
        (["--lr_schedule", "cosin"], "one of cosine, linear, constant, wsd", "--lr_schedule cosine"),
        (["--loss_agg_mode", "token_mean"], "one of token-mean", "--loss_agg_mode token-mean"),
        (["--adam_betas", "0.9"], "two numbers of at least 0 and below 1", "--adam_betas 0.9 0.95"),
        (["--eps_clip_high", "-1"], "a number above 0, or none", "--eps_clip_high none"),
    ],
)
def test_a_bad_value_is_told_with_what_is_allowed_and_one_remedy(argv: list[str], allowed: str, remedy: str) -> None:
    (problem,) = problems_of(*argv)
    assert f"{argv[0]} = {argv[1]}" in problem.what
    assert allowed in problem.what
    assert problem.where == "command line"
    assert problem.do == remedy
    resolve("rl", ["--pretrain", "model", *remedy.split()])


def test_a_flag_without_its_value_is_told() -> None:
    (problem,) = problems_of("--seed", "--bf16")
    assert problem.what.startswith("--seed needs a value")


def test_a_word_that_belongs_to_no_flag_is_told() -> None:
    assert "unexpected argument 'quick'" in problems_of("quick")[0].what
    assert "unexpected argument '5'" in problems_of("--seed", "4", "5")[0].what


def test_a_key_given_as_a_project_is_refused_and_not_shown() -> None:
    key = "0123456789abcdef0123456789abcdef01234567"
    (problem,) = problems_of("--use_wandb", key)
    assert key not in problem.as_json(2)
    assert "WANDB_API_KEY" in problem.do


# --- names that do not exist


def test_all_problems_are_told_at_once() -> None:
    found = problems_of(
        "--sede", "1", "--bf16", "maybe", "--grad_accum_dtype", "3", "--top_p", "2", "--foo=1", pretrain=False
    )
    told = " ".join(problem.what for problem in found)
    assert all(name in told for name in ("--sede", "--bf16", "--grad_accum_dtype", "--top_p", "--foo", "--pretrain"))
    assert len(found) == 6


def test_the_values_of_an_unknown_flag_are_not_told_again() -> None:
    assert len(problems_of("--rewards_clip", "1", "2", "three")) == 1


def test_a_remedy_keeps_the_value_that_was_given() -> None:
    assert problems_of("--rolout_batch_size", "32")[0].do == "--rollout_batch_size 32"


def test_a_flag_of_another_command_is_told_as_such() -> None:
    (problem,) = problems_of("--learning_rate", "1e-4")
    assert "rft-train sft" in problem.why
    assert problem.do == "--actor_learning_rate 1e-4"
    assert problems_of("--actor_learning_rate", "1e-4", command="sft")[0].do == "--learning_rate 1e-4"


def test_up_to_three_names_are_suggested() -> None:
    assert problems_of("--micro_batch_sizes", "4")[0].why.count("--") >= 2
    assert problems_of("--qqqqqqqqqqqq", "4")[0].do == "rft-train rl --help"


def typo(word: str, rng: random.Random) -> str:
    """One edit: a letter left out, doubled, replaced, put in, or swapped with its neighbour."""
    at, letter = rng.randrange(len(word)), rng.choice(string.ascii_lowercase)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1 :]
    if kind == 1:
        return word[:at] + letter + word[at:]
    if kind == 2:
        return word[:at] + letter + word[at + 1 :]
    return word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :] if at else word[1] + word[0] + word[2:]


@pytest.mark.parametrize("edits", [1, 2])
def test_the_right_name_is_suggested_first_for_typos(edits: int) -> None:
    rng = random.Random(20261120 + edits)
    known = list(schema("rl"))
    long_enough = [name for name in known if len(name) > 2 * edits]
    tried, right = 0, 0
    while tried < 500:
        name = wrong = rng.choice(long_enough)
        for _ in range(edits):
            wrong = typo(wrong, rng)
        if wrong in known:
            continue
        tried += 1
        right += nearest_names(wrong, known)[:1] == [name]
    assert right >= 0.95 * tried, f"{right} of {tried}"


def test_a_typo_on_the_command_line_names_the_right_flag_first() -> None:
    assert problems_of("--pakcing_samples")[0].why.startswith("nearest: --packing_samples")
    assert problems_of("--adm_betas", "0.9", "0.95")[0].do == "--adam_betas 0.9 0.95"
