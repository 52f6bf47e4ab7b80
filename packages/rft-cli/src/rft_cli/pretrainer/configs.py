"""The guide's configurations as Python objects: of a decoder, of the ranks, and of checkpoints.

Each has the guide's names. `flags()` gives what is not a default as flags of `rft-train pretrain`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from rft.config.values import as_text
from rft_cli.pretrainer.fields import ENVIRONMENT
from rft_core.errors import OptionsError
from rft_models.new_decoders.sizes import decoder_refusals
from rft_models.settings import DecoderSettings


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderSettings):
    """The decoder to build, checked as `rft-train pretrain` checks it.

    Example: `ModelConfig(hidden_size=256, num_heads=4, num_layers=4).flags()` is
    `["--hidden_size", "256", "--num_layers", "4", "--num_heads", "4"]`.

    Raises:
        OptionsError: sizes that do not fit together.
    """

    def __post_init__(self) -> None:
        for refusal in decoder_refusals(self):
            raise refusal.as_error(asdict(self))

    def flags(self) -> list[str]:
        """Return the flags that mean the same."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        changed = {name: value for name, value in given.items() if value != getattr(_PLAIN_DECODER, name)}
        return [word for name, value in changed.items() for word in (f"--{name}", as_text(value))]


_PLAIN_DECODER = DecoderSettings()


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The ranks of a run: machines, and processes of each."""

    master_addr: str = "127.0.0.1"
    master_port: int = 12355
    num_nodes: int = 1
    gpus_per_node: int = 1
    """Processes of each machine, one a GPU where there are any."""
    node_rank: int = 0

    def __post_init__(self) -> None:
        for name, low in (("num_nodes", 1), ("gpus_per_node", 1), ("node_rank", 0), ("master_port", 1)):
            if getattr(self, name) < low:
                raise self._refused(name, f"it is a whole number of at least {low}", f"{name}={low}")
        if self.node_rank >= self.num_nodes:
            why = f"machines are numbered from 0 to {self.num_nodes - 1}"
            raise self._refused("node_rank", why, f"node_rank={self.num_nodes - 1}")

    @property
    def world_size(self) -> int:
        """Ranks of the run: `num_nodes * gpus_per_node`."""
        return self.num_nodes * self.gpus_per_node

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> DistributedConfig:
        """Return what GPUS_PER_NODE, NUM_NODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say.

        Raises:
            OptionsError: a number that is none, or that does not fit.
        """
        values = os.environ if environment is None else environment
        given: dict[str, int | str] = {}
        for variable, field_name in ENVIRONMENT.items():
            name, text = field_name.removeprefix("distributed_"), values.get(variable, "")
            if text and name != "master_addr" and not text.isdecimal():
                raise OptionsError(
                    code="pretrainer.distributed",
                    what=f"{variable}={text}",
                    where=f"environment variable {variable}",
                    why="it is a whole number",
                    do=f"export {variable}=1",
                )
            if text:
                given[name] = text if name == "master_addr" else int(text)
        return cls(**given)  # pyright: ignore[reportArgumentType] - each name has a value of its own kind

    def flags(self) -> list[str]:
        """Return the flags that mean the same; none for one process."""
        if self.num_nodes == 1:
            return ["--nproc", str(self.gpus_per_node)] if self.gpus_per_node > 1 else []
        return [
            word
            for item in fields(self)
            for word in (f"--distributed-{item.name.replace('_', '-')}", str(getattr(self, item.name)))
        ]

    def _refused(self, name: str, why: str, do: str) -> OptionsError:
        return OptionsError(
            code="pretrainer.distributed",
            what=f"{name} = {getattr(self, name)}",
            where="DistributedConfig(...)",
            why=why,
            do=do,
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of a training loop is saved, and what it goes on from."""

    checkpoint_dir: str = "checkpoints"
    resume_from_checkpoint: str | None = None
    """A checkpoint, or the directory of several; auto = the newest in `checkpoint_dir` that verifies."""
    save_interval: int = 1
    """Epochs between two of them."""
    keep_last_n: int = 5
    save_best: bool = True
    """Save an epoch with a lower loss than all before in any case, and keep it beyond `keep_last_n`."""
