"""The pre-training term beside the rewards (PTX): its weight and its rows. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings:
    """The mean loss of demonstrations or texts, added to every update of the policy (PTX)."""

    pretrain_data: str = ""
    """Demonstrations or texts whose likelihood is learned beside the rewards, as many rows an update as
    `train_batch_size`; as `prompt_data` several joined by commas, empty = none."""

    pretrain_data_probs: str = ""
    """Shares of the several `pretrain_data`, joined by commas; empty = by their sizes."""

    pretrain_split: str = "train"
    """Split of `pretrain_data` to use, where it has splits."""

    pretrain_input_key: str = "input"
    """Column of `pretrain_data` that holds the prompt of a demonstration, rendered as those of `prompt_data`."""

    pretrain_output_key: str = "output"
    """Column of `pretrain_data` that holds the response to learn."""

    pretrain_text_key: str = ""
    """Column of `pretrain_data` that holds plain texts, of which every token is learned; empty = the rows are
    demonstrations."""

    ptx_coef: float = field(default=0.05, metadata={"minimum": 0.0})
    """Weight of their mean loss a token, in nats, beside the loss of the rewards (with `pretrain_data`)."""
