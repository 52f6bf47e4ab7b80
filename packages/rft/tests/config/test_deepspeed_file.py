"""Files of accelerate and DeepSpeed as settings."""

from pathlib import Path

import pytest

from rft.config.deepspeed_file import read_deepspeed
from rft_core.errors import OptionsError

ZERO_2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
# num_processes: 8
mixed_precision: bf16

deepspeed_config:
  zero_stage: 2
  contiguous_gradients: true
  overlap_comm: true
  reduce_scatter: true
  reduce_bucket_size: 5e8
  allgather_bucket_size: 5e8
  offload_optimizer_device: none
  offload_param_device: none
debug: false"""
"""MiniOneRec's config/zero2_opt.yaml."""


def write(folder: Path, text: str) -> Path:
    (folder / "zero.yaml").write_text(text)
    return folder / "zero.yaml"


def test_the_file_of_the_guide_is_read(tmp_path: Path) -> None:
    read = read_deepspeed(write(tmp_path, ZERO_2))
    assert read.settings == {"bf16": "true", "zero_stage": "2", "overlap_comm": "true"}
    assert read.accumulation is None
    assert len(read.notes) == 6
    assert read.notes[1].startswith("contiguous_gradients = true (zero.yaml:9) has no effect: ")


def test_what_the_guide_may_add_is_read(tmp_path: Path) -> None:
    text = ZERO_2.replace("optimizer_device: none", "optimizer_device: cpu").replace("mixed_precision: bf16", "")
    more = "\n  gradient_clipping: 0.3\n  gradient_accumulation_steps: 2\n"
    read = read_deepspeed(write(tmp_path, text.replace("\ndebug", f"{more}num_processes: 8\ndebug")))
    assert read.settings == {
        "zero_stage": "2",
        "overlap_comm": "true",
        "adam_offload": "true",
        "max_norm": "0.3",
        "nproc": "8",
    }
    assert read.accumulation == 2


def test_the_form_of_deepspeed_is_read(tmp_path: Path) -> None:
    text = """{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}},
      "fp16": {"enabled": true}, "bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto",
      "train_micro_batch_size_per_gpu": 4, "train_batch_size": "auto", "gradient_clipping": "auto"}"""
    read = read_deepspeed(write(tmp_path, text))
    assert read.settings == {
        "zero_stage": "3",
        "adam_offload": "true",
        "fp16": "true",
        "micro_train_batch_size": "4",
    }


@pytest.mark.parametrize(
    ("line", "where", "said"),
    [
        ("zero_stage: 4", ":1", "zero_stage = 4 cannot be used"),
        ("zero_stages: 2", ":1", "it has no meaning here"),
        ("a: 1\nzero_stage: 2", ":1", "it has no meaning here"),
        ("mixed_precision: fp8", ":1", "bf16, fp16 or no"),
        ("overlap_comm: maybe", ":1", "true or false"),
        ("num_machines: 2", ":1", "named to the launcher"),
        ("distributed_type: FSDP", ":1", "DEEPSPEED"),
        ("gradient_accumulation_steps: 0", ":1", "above 0"),
        ("gradient_accumulation_steps: 1.5", ":1", "above 0"),
        ("zero_stage: 2\noffload_param_device: cpu", ":2", "stay on the GPU"),
        ("zero_stage: 2\noffload_optimizer_device: nvme", ":2", "the CPU"),
        ("offload_optimizer_device: cpu", ":1", "would have no effect"),
        ("zero_stage: 0\noffload_optimizer_device: cpu", ":2", "would have no effect"),
        ("fp16: {loss_scale: 0}", ":1", "fp16.loss_scale"),
    ],
)
def test_what_has_no_meaning_or_no_effect_is_refused_with_its_line(
    tmp_path: Path, line: str, where: str, said: str
) -> None:
    path = write(tmp_path, line)
    with pytest.raises(OptionsError, match=said) as caught:
        read_deepspeed(path)
    assert caught.value.problem.where == f"{path}{where}"


@pytest.mark.parametrize(
    ("line", "why", "do"),
    [
        ("zero_stages: 2", "the nearest is zero_stage", "zero_stage"),
        ("optimizer: {type: AdamW}", "--adam_betas", "leave optimizer out"),
        ("fp16: {loss_scale: 0}", "--fp16 alone", "leave it out"),
        ("zero_stage: 4", "--zero_stage", "zero_stage: 2"),
        ("mixed_precision: fp8", "--bf16 and --fp16", "mixed_precision: bf16"),
        ("num_machines: 3", "other machines", "torchrun --nnodes 3 "),
        ("offload_param_device: cpu", "--fsdp_cpu_offload", "--fsdp --fsdp_cpu_offload"),
        ("offload_param_device: nvme", "--fsdp_cpu_offload", "offload_param_device: none"),
        ("offload_optimizer_device: nvme", "--adam_offload", "offload_optimizer_device: cpu"),
        ("offload_optimizer_device: cpu", "--adam_offload", "zero_stage: 2"),
        ("distributed_type: FSDP", "flags of their own", "--fsdp"),
    ],
)
def test_every_key_has_its_own_reason_and_remedy(tmp_path: Path, line: str, why: str, do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        read_deepspeed(write(tmp_path, line))
    problem = caught.value.problem
    assert why in problem.why
    assert problem.do.startswith(do)
    assert problem.code == "deepspeed.key"


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "&a [*a]", "!!python/object/apply:os.getpid []", "\x00"])
def test_what_holds_no_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(OptionsError) as caught:
        read_deepspeed(write(tmp_path, text))
    assert caught.value.problem.code == "deepspeed.file"
    with pytest.raises(OptionsError):
        read_deepspeed(tmp_path / "absent.yaml")
