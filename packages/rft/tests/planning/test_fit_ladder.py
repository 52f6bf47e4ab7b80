"""The ladder down to the memory of a GPU: its order, what is left out, and the flags that are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rft.planning.fit_ladder import fit_ladder

GIB = 2**30
VALUES: dict[str, Any] = {
    "fused_linear_logprob": False,
    "micro_train_batch_size": 12,
    "max_tokens_per_micro_batch": 0,
    "packing_samples": False,
    "gradient_checkpointing": False,
    "gradient_checkpointing_mode": "full",
}


class Machine:
    """Bytes of a run: 1 GiB of weights, and logits and activations of every row of a micro-batch."""

    def __init__(self, values: Mapping[str, Any], logits: float = 1.0, activations: float = 1.0) -> None:
        self.values, self.logits, self.activations = values, logits, activations
        self.asked: list[dict[str, Any]] = []

    def __call__(self, changes: Mapping[str, Any]) -> int:
        self.asked.append(dict(changes))
        now = {**self.values, **changes}
        rows = now["micro_train_batch_size"]
        logits = 0.5 if now["fused_linear_logprob"] else self.logits * rows
        kept = (
            {"selective": 0.6, "full": 0.2}[now["gradient_checkpointing_mode"]] if now["gradient_checkpointing"] else 1
        )
        return int((1 + logits + self.activations * rows * kept) * GIB)


def test_what_fits_has_no_ladder_and_nothing_else_is_planned() -> None:
    machine = Machine(VALUES)
    assert fit_ladder(VALUES, 9 * GIB, 10, machine) is None
    assert machine.asked == []
    assert fit_ladder(VALUES, 9 * GIB + 1, 10, machine) is not None


def test_rungs_are_climbed_in_order_until_it_fits() -> None:
    machine = Machine(VALUES)
    ladder = fit_ladder(VALUES, machine({}), 10, machine)
    assert ladder is not None
    assert [rung.flags for rung in ladder.rungs] == ["--fused_linear_logprob", "--micro_train_batch_size 6"]
    assert machine.asked[1:] == [
        {"fused_linear_logprob": True},
        {"fused_linear_logprob": True, "micro_train_batch_size": 6},
    ]
    assert (ladder.flags, ladder.fits) == ("--fused_linear_logprob --micro_train_batch_size 6", True)
    assert ladder.training_bytes == ladder.rungs[-1].training_bytes == int(7.5 * GIB)


def test_the_last_micro_batch_is_one_and_then_activations_are_computed_again() -> None:
    machine = Machine(VALUES, activations=4.0)
    ladder = fit_ladder(VALUES, machine({}), 4, machine)
    assert ladder is not None
    assert [rung.flags for rung in ladder.rungs][1:] == [
        "--micro_train_batch_size 6",
        "--micro_train_batch_size 3",
        "--micro_train_batch_size 1",
        "--gradient_checkpointing --gradient_checkpointing_mode selective",
        "--gradient_checkpointing --gradient_checkpointing_mode full",
    ]
    assert ladder.flags.endswith(
        "--micro_train_batch_size 1 --gradient_checkpointing --gradient_checkpointing_mode full"
    )
    assert ladder.fits
    smaller = fit_ladder(VALUES, machine({}), 2, machine)
    assert smaller is not None
    assert not smaller.fits


def test_a_rung_that_does_not_lower_the_peak_is_left_out() -> None:
    machine = Machine(VALUES, logits=0.0)
    ladder = fit_ladder(VALUES, machine({}), 10, machine)
    assert ladder is not None
    assert [rung.kept for rung in ladder.rungs] == [False, True]
    assert ladder.flags == "--micro_train_batch_size 6"
    assert machine.asked[-1] == {"micro_train_batch_size": 6}


def test_what_the_settings_do_already_is_no_rung() -> None:
    values = VALUES | {"fused_linear_logprob": True, "micro_train_batch_size": 1, "gradient_checkpointing": True}
    ladder = fit_ladder(values, 20 * GIB, 10, lambda _: 20 * GIB)
    assert ladder is not None
    assert (ladder.rungs, ladder.flags, ladder.fits) == ([], "", False)
    selective = values | {"gradient_checkpointing_mode": "selective"}
    ladder = fit_ladder(selective, 20 * GIB, 10, lambda _: GIB)
    assert ladder is not None
    assert ladder.flags == "--gradient_checkpointing_mode full"


def test_without_an_output_matrix_there_are_no_logits_to_cut() -> None:
    ladder = fit_ladder(VALUES, 20 * GIB, 10, lambda _: GIB, has_token_head=False)
    assert ladder is not None
    assert ladder.flags == "--micro_train_batch_size 6"


def test_packed_micro_batches_are_cut_by_their_tokens() -> None:
    values = VALUES | {"packing_samples": True, "max_tokens_per_micro_batch": 8192}
    ladder = fit_ladder(values, 20 * GIB, 10, lambda changes: (21 if "fused_linear_logprob" in changes else 1) * GIB)
    assert ladder is not None
    assert ladder.flags == "--max_tokens_per_micro_batch 4096"
