"""Exchange of rollout groups between ranks: numbers of tokens as columns, the rest of a rollout as an exact record.

```
n bytes                                   8 bytes a token     4 or 8 bytes a token        4 or 8 bytes a token
header (`rft_core.exact_records`)         token ids           log-probs                   log kept mass
```

Numbers are as the machine stores them. Floats take 4 bytes where all of them are float32 values, else 8, so that every
float arrives with the bits that it had. Prompts are not sent: every rank has them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rft_core.errors import OutageError
from rft_core.exact_records import exact_bytes, split_exact
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.protocols import Collectives
from rft_trainer.records.flat_numbers import flat_tensor
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import turns_from_json

_PER_TOKEN = ("completion_ids", "behaviour_logprobs", "log_kept_mass")
_IN_HEADER = tuple(field.name for field in fields(Rollout) if field.name not in _PER_TOKEN)


class ExchangedGroups:
    """The groups of one rank as they arrived, or the error that it sent in their place."""

    def __init__(self, data: bytes) -> None:
        self._header: dict[str, Any]
        self._header, self._columns = split_exact(data)

    @property
    def error(self) -> Mapping[str, str] | None:
        """The fields that the rank sent with `encode_error`; None where it sent groups."""
        return self._header.get("error")

    def groups(self, prompts: Mapping[tuple[int, int], Prompt]) -> list[RolloutGroup]:
        """Return the groups; `prompts` has the prompt of each (epoch, position)."""
        rollouts = iter(self._rollouts())
        groups = list[RolloutGroup]()
        for row in self._header["groups"]:
            own = tuple(islice(rollouts, row["num_rollouts"]))
            prompt = prompts[row["epoch"], row["position"]]
            groups.append(RolloutGroup(prompt, row["epoch"], row["position"], own, row["baseline_reward"]))
        return groups

    def _rollouts(self) -> Iterable[Rollout]:
        columns = list(self._lists())
        fields_of_all = [_column(one, len(self._header["lengths"])) for one in self._header["fields"]]
        start = 0
        for length, *values in zip(self._header["lengths"], *fields_of_all, strict=True):
            end = start + length
            per_token = {name: column[start:end] for name, column in zip(_PER_TOKEN, columns, strict=True)}
            yield rollout_from_json(dict(zip(_IN_HEADER, values, strict=True)) | per_token)
            start = end

    def _lists(self) -> Iterable[list[Any]]:
        start, num_tokens = 0, self._header["num_tokens"]
        for code in self._header["types"]:
            # from the type codes of the sender: its floats may be wide where another rank's are narrow
            column = array(code)
            end = start + num_tokens * column.itemsize
            column.frombytes(self._columns[start:end])
            yield column.tolist()
            start = end


def encode_groups(groups: Sequence[RolloutGroup]) -> bytes:
    """Return groups as bytes, without their prompts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ids = _bytes(flat_tensor((rollout.completion_ids for rollout in rollouts), torch.int64))
    columns = [
        ("q", ids),
        _floats(rollout.behaviour_logprobs for rollout in rollouts),
        _floats(rollout.log_kept_mass for rollout in rollouts),
    ]
    rows = [
        {
            "epoch": group.epoch,
            "position": group.position,
            "baseline_reward": group.baseline_reward,
            "num_rollouts": len(group.rollouts),
        }
        for group in groups
    ]
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    header = exact_bytes(
        {
            "groups": rows,
            "types": [code for code, _ in columns],
            "num_tokens": sum(lengths),
            "lengths": lengths,
            "fields": [_same_or_all([getattr(rollout, name) for rollout in rollouts]) for name in _IN_HEADER],
        }
    )
    return b"".join([header, *(data for _, data in columns)])


def encode_error(error: Mapping[str, str]) -> bytes:
    """Return the fields of an error as bytes, for an exchange in which the other ranks send groups."""
    return exact_bytes({"error": error})


def exchange_groups(
    collectives: Collectives, groups: Sequence[RolloutGroup], entries: Sequence[LedgerEntry], prompts: Sequence[Prompt]
) -> list[RolloutGroup]:
    """Gather the groups of all ranks on every rank, in the order of `entries`.

    Args:
        collectives: the ranks.
        groups: those of this rank.
        entries: of the groups of all ranks.
        prompts: one an entry.

    Raises:
        OutageError: another rank has none, because its reward server is away (`share_outage`).
    """
    sent = encode_groups(groups)
    # its own groups are here already
    arrived = [
        ExchangedGroups(data) for rank, data in enumerate(collectives.gather_bytes(sent)) if rank != collectives.rank
    ]
    for part in arrived:
        if part.error is not None:
            raise OutageError(**part.error)
    return in_order(arrived, entries, prompts, own=groups)


def share_outage(collectives: Collectives, outage: OutageError) -> None:
    """Send an outage in the place of this rank's groups, so that the ranks in `exchange_groups` raise it too."""
    if collectives.world_size > 1:
        collectives.gather_bytes(encode_error(asdict(outage.problem)))


def in_order(
    parts: Sequence[ExchangedGroups],
    entries: Sequence[LedgerEntry],
    prompts: Sequence[Prompt],
    *,
    own: Sequence[RolloutGroup] = (),
) -> list[RolloutGroup]:
    """Return the groups of all ranks in the order of `entries`, with these prompts; `own` were not exchanged."""
    by_place = {(entry.epoch, entry.position): prompt for entry, prompt in zip(entries, prompts, strict=True)}
    # by place and not by rank: the result is that of one rank that had sampled all
    groups = {(group.epoch, group.position): group for part in parts for group in part.groups(by_place)}
    groups |= {(group.epoch, group.position): group for group in own}
    return [groups[position] for position in by_place]


def rollout_from_json(row: Mapping[str, Any]) -> Rollout:
    """Build a rollout from its fields after JSON."""
    values: dict[str, Any] = {
        **row,
        **{name: tuple(row[name]) for name in _PER_TOKEN},
        "status": RewardStatus(row["status"]),
        "steps": tuple((int(index), float(value)) for index, value in row["steps"]),
        "turns": turns_from_json(row["turns"]),
        "version_spans": tuple((int(v), int(n)) for v, n in row.get("version_spans", ())),
    }
    return Rollout(**values)


def group_from_json(row: Mapping[str, Any]) -> RolloutGroup:
    """Build a rollout group from its fields after JSON, as a checkpoint stores it."""
    prompt = row["prompt"]
    lists = {"token_ids": tuple(prompt["token_ids"]), "messages": tuple(prompt.get("messages", ()))}
    return RolloutGroup(
        prompt=Prompt(**(prompt | lists)),
        epoch=row["epoch"],
        position=row["position"],
        baseline_reward=row["baseline_reward"],
        rollouts=tuple(rollout_from_json(rollout) for rollout in row["rollouts"]),
    )


def _same_or_all(values: list[Any]) -> dict[str, Any]:
    """Return a field of all rollouts: one value where all have the same, which most fields have."""
    first = values[0] if values else None
    # of a float equality is not enough: it would take -0.0 for 0.0
    if not isinstance(first, float) and all(type(value) is type(first) and value == first for value in values):
        return {"same": first} if _has_no_float(first) else {"all": values}
    return {"all": values}


def _has_no_float(value: Any) -> bool:
    return value is None or isinstance(value, str | int) or value in ((), {})


def _column(field: Mapping[str, Any], count: int) -> Iterable[Any]:
    return field["all"] if "all" in field else [field["same"]] * count


def _floats(rows: Iterable[Sequence[float]]) -> tuple[str, bytes]:
    """Return (type code, bytes) of float32 numbers where they are exactly the values, else of float64."""
    wide = flat_tensor(rows, torch.float64)
    # compared after the round trip; NaN is unequal to itself and travels as float64
    narrow = wide.float()
    return ("f", _bytes(narrow)) if torch.equal(narrow.double(), wide) else ("d", _bytes(wide))


def _bytes(numbers: Tensor) -> bytes:
    return numbers.numpy().tobytes()
