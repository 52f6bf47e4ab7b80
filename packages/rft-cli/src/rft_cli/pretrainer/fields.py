"""Every field of the pre-trainer's configuration, with the setting that has its meaning here.

The names are those of its guide: `training.batch_size` in files is `--training-batch-size` on the command line. The
defaults are shown beside ours and never used: what is not given has this project's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rft.config.schema import Setting

NO_COMPILE = "no_compile"
"""A flag of the guide; without its first word it is a setting here, which is no switch."""
COMMAND = "pretrain"
"""The command whose settings the fields are."""

SchedulerName = Literal["cosine", "linear", "constant", "wsd", "step", "plateau"]
AmpDtype = Literal["auto", "float16", "bfloat16", "fp16", "bf16"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideField:
    """A field of the pre-trainer's configuration."""

    group: str
    name: str
    kind: Any
    """The annotation of its values."""
    default: str
    """The guide's default as it prints it; ours may differ."""
    to: str = ""
    """The setting that has its meaning here; empty = there is none of one value."""
    about: str = ""
    """What becomes of it, where that is more than another name."""
    short: tuple[str, ...] = ()
    """Names without the group, beside its own, as in `--no-amp`."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def flat_name(self) -> str:
        """Its name on the command line, with underscores."""
        return f"{self.group}_{self.name}"

    def setting(self, name: str) -> Setting:
        """Its row for the readers of command lines and files, under one of its names."""
        own = self.name if name == self.flat_name else ""
        return Setting(name, self.group, self.kind, None, self.metadata, own)


def _model(name: str, kind: Any, default: str, about: str = "") -> GuideField:
    return GuideField(group="model", name=name, kind=kind, default=default, to=name, about=about)


_NO_LOADER = "no effect: windows are read from a memory map in microseconds, and no process prefetches them"

FIELDS: tuple[GuideField, ...] = (
    _model("hidden_size", int, "512"),
    _model("num_heads", int, "8"),
    _model("num_kv_heads", int | None, "none"),
    _model("ffn_hidden_size", int | None, "none (4 x hidden_size)", "derived after all sources are merged"),
    _model("num_layers", int, "2"),
    _model("dropout", float, "0.1", "above 0 it is the family own"),
    _model("use_glu", bool, "false", "off it is the family own"),
    _model("vocab_size", int | None, "50257", "no fewer than the tokenizer has tokens"),
    _model("max_seq_len", int, "512"),
    _model("use_moe", bool, "false"),
    _model("num_experts", int, "0"),
    _model("top_k", int, "0"),
    GuideField(
        group="training",
        name="batch_size",
        kind=int,
        default="128",
        to="train_batch_size",
        about="windows of a step over all ranks; --micro_train_batch_size says how many at once",
    ),
    GuideField(
        group="training",
        name="epochs",
        kind=int,
        default="10",
        to="max_epochs",
        about="converted to steps when the text is counted; `check` and the start print them",
    ),
    GuideField(group="training", name="lr", kind=float, default="1e-3", to="learning_rate"),
    GuideField(
        group="training",
        name="weight_decay",
        kind=float,
        default="0.01",
        to="l2",
        about="of matrices; norms, biases and embeddings have none",
    ),
    GuideField(group="training", name="num_samples", kind=int, default="20000", to="max_samples", about="windows"),
    GuideField(
        group="training",
        name="scheduler_type",
        kind=SchedulerName,
        default="cosine",
        to="lr_schedule",
        about="by steps; step and plateau are refused",
    ),
    GuideField(
        group="training",
        name="warmup_epochs",
        kind=float,
        default="1",
        about="becomes lr_warmup_ratio, the share of the epochs, and is printed",
        metadata={"minimum": 0.0},
    ),
    GuideField(group="training", name="gradient_clip_val", kind=float, default="1.0", to="max_norm"),
    GuideField(
        group="training",
        name="run_validation",
        kind=bool,
        default="true",
        about="true holds out 0.1 of the text where neither held_out_share nor eval_data is given; false nothing",
    ),
    GuideField(
        group="distributed",
        name="master_addr",
        kind=str,
        default="127.0.0.1",
        about="where the ranks of all machines meet; also MASTER_ADDR",
    ),
    GuideField(
        group="distributed",
        name="master_port",
        kind=int,
        default="12355",
        about="its port; ranks of one machine alone take a free one; also MASTER_PORT",
        metadata={"minimum": 1, "maximum": 65535},
    ),
    GuideField(
        group="distributed",
        name="num_nodes",
        kind=int,
        default="1",
        about="machines, each of which starts this command; also NUM_NODES",
        metadata={"minimum": 1},
    ),
    GuideField(
        group="distributed",
        name="gpus_per_node",
        kind=int,
        default="visible GPUs",
        to="nproc",
        about="processes of this machine, on a CPU too; also GPUS_PER_NODE",
        metadata={"minimum": 1},
    ),
    GuideField(
        group="distributed",
        name="node_rank",
        kind=int,
        default="0",
        about="which of the machines this is; also NODE_RANK",
        metadata={"minimum": 0},
    ),
    GuideField(
        group="distributed",
        name="backend",
        kind=Backend,
        default="nccl",
        about="nccl on GPUs and gloo on a CPU, chosen by the device; another one by NCCL_BACKEND",
    ),
    GuideField(
        group="optimization",
        name="use_compile",
        kind=bool,
        default="true",
        to="compile",
        about="true = auto, which is off on a CPU; false = off; also --no-compile",
        short=(NO_COMPILE,),
    ),
    GuideField(
        group="optimization",
        name="use_amp",
        kind=bool,
        default="true",
        to="amp",
        short=("amp",),
    ),
    GuideField(
        group="optimization",
        name="amp_dtype",
        kind=AmpDtype,
        default="auto",
        to="amp_dtype",
        about="float16 has a loss scale; a CPU that cannot multiply bfloat16 stays with float32",
    ),
    GuideField(
        group="optimization",
        name="num_workers",
        kind=int,
        default="4",
        to="data_store_workers",
        about="processes that tokenise, once; steps wait for none",
    ),
    GuideField(group="optimization", name="pin_memory", kind=bool, default="true", to="dataloader_pin_memory"),
    GuideField(group="optimization", name="prefetch_factor", kind=int, default="2", about=_NO_LOADER),
    GuideField(group="optimization", name="persistent_workers", kind=bool, default="false", about=_NO_LOADER),
    GuideField(
        group="checkpoint",
        name="checkpoint_dir",
        kind=str,
        default="checkpoints",
        to="save_path",
        about="the run's directory, which holds checkpoints/",
    ),
    GuideField(
        group="checkpoint",
        name="resume_from_checkpoint",
        kind=str | None,
        default="none",
        about="auto, or bare: the newest that verifies in save_path; PATH: that run or checkpoint; missing = an error",
        metadata={"bare": "auto"},
    ),
    GuideField(
        group="checkpoint", name="save_interval", kind=int, default="1", to="save_interval", about="epochs", short=()
    ),
    GuideField(group="checkpoint", name="keep_last_n", kind=int, default="5", to="max_ckpt_num"),
    GuideField(
        group="checkpoint",
        name="save_best",
        kind=bool,
        default="true",
        to="keep_best",
        about="by the held-out loss; true needs --held_out_share or --eval_data",
    ),
    GuideField(group="logging", name="log_interval", kind=int, default="10", to="log_interval"),
    GuideField(
        group="logging",
        name="log_level",
        kind=LogLevel,
        default="INFO",
        about="DEBUG is --debug; INFO is what is printed; the others are refused",
    ),
    GuideField(
        group="logging",
        name="log_dir",
        kind=str,
        default="logs",
        to="use_tensorboard",
        about="TensorBoard's files go there; the log of every rank stands in the run's own logs/",
    ),
    GuideField(
        group="logging",
        name="save_logs",
        kind=bool,
        default="true",
        about="true is what is done, for every rank; false is refused",
    ),
)
"""In the order of the guide's groups."""

GROUPS = tuple(dict.fromkeys(row.group for row in FIELDS))

ENVIRONMENT: Mapping[str, str] = {
    "GPUS_PER_NODE": "distributed_gpus_per_node",
    "NUM_NODES": "distributed_num_nodes",
    "NODE_RANK": "distributed_node_rank",
    "MASTER_ADDR": "distributed_master_addr",
    "MASTER_PORT": "distributed_master_port",
}
"""Variables of the environment that give a field."""
