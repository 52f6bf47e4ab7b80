"""Reward from a function in the user's file, run in processes that can be killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.images import sources_of
from rft_trainer.workers.failure_reports import FailureReports
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.output_log import OutputLog
from rft_trainer.workers.pool import Job, Outcome, WorkerPool
from rft_trainer.workers.reward_arguments import COLUMN, KNOWN, SINGULAR, Binding, FunctionFacts, bind
from rft_trainer.workers.user_file import calls_of


@dataclass(frozen=True, slots=True)
class RewardTrial:
    """One call of a reward function, to look at."""

    written: str
    """The function's head."""
    place: str
    """file:line of its definition; empty for a rule, which is no user's."""
    arguments: Mapping[str, Any]
    """What it was given in its first call, by the names of its arguments."""
    responses: tuple[str, ...]
    scores: tuple[Score, ...]
    traceback: str
    """Of the first response for which it raised; empty otherwise."""
    printed: str
    """The end of what it printed."""
    notes: tuple[str, ...] = ()
    """What is remarkable in the scores, such as other ones for the same responses in another order."""


class FileReward:
    """Reward that calls a function of a file, once a prompt with all its responses or once a response.

    Its arguments are bound by their names (`reward_arguments`). What it prints goes to the log of the run. It may keep
    state in its module, but each of the processes has its own, and a killed one starts over.
    """

    def __init__(
        self,
        path: str | Path,
        function: str,
        *,
        num_workers: int = 1,
        timeout: float = 10.0,
        limits: ProcessLimits | None = None,
        kind: str = "file",
        columns: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """Load the file and bind the function's arguments.

        Args:
            path: a Python file.
            function: its name; see `user_file` for the signature.
            num_workers: processes, each of which imports the file.
            timeout: seconds allowed for each response of a call.
            limits: memory of each process, and the secrets that it sees.
            kind: "file", or "installed" or "module" where `path` is the name of a module.
            columns: those of the data, each with a row that lacks it, or "".
            log: file for what the function prints, and for tracebacks.

        Raises:
            OptionsError: no such file or function, or arguments that cannot be bound.
            DataError: the file raises while it is imported.
        """
        self._timeout = timeout
        self._reports = FailureReports(f"{path}:{function}", log)
        self._output = _Output(None if log is None else OutputLog(log))
        self._pool = WorkerPool(
            f"{kind}:{path}:{function}", num_workers=num_workers, limits=limits, output=self._output.write
        )
        self._pool.start()
        try:
            self._facts = FunctionFacts.from_json(self._pool.about["function"])
            self._binding = bind(self._facts, columns or {})
        except BaseException:
            self._pool.close()
            raise

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        calls = [list(call) for _, call in groupby(items, key=lambda item: item.prompt_id)]
        outcomes = self._outcomes(calls)
        return [
            self._reported(score, found)
            for call, outcome in zip(calls, outcomes, strict=True)
            for score, found in _scores(outcome, len(call))
        ]

    def trial(self, items: Sequence[RewardItem]) -> RewardTrial:
        """Call the function with responses to one prompt, and return what it was given and gave."""
        self._output.tail = b""
        [outcome] = self._outcomes([items])
        found = _scores(outcome, len(items))
        [given, *_] = calls_of(payload(items, self._binding))
        traces = [str(more["traceback"]) for _, more in found if more.get("traceback")]
        # a traceback is printed too
        printed = self._output.tail.decode(errors="replace")
        for trace in traces:
            printed = printed.replace(trace, "")
        return RewardTrial(
            written=self._facts.written,
            place=self._facts.place,
            arguments=given,
            responses=tuple(item.response_text for item in items),
            scores=tuple(score for score, _ in found),
            traceback=next(iter(traces), ""),
            printed=printed.strip(),
        )

    def close(self) -> None:
        """Stop the worker processes."""
        self._pool.close()

    def _outcomes(self, calls: Sequence[Sequence[RewardItem]]) -> list[Outcome]:
        # the deadline grows with the responses, since they are scored in one call
        return self._pool.run([Job(payload(call, self._binding), self._timeout * len(call)) for call in calls])

    def _reported(self, score: Score, more: Mapping[str, Any]) -> Score:
        if score.value is None:
            self._reports.report(score, place=str(more.get("place", "")), traceback=str(more.get("traceback", "")))
        return score


class _Output:
    """Output of the processes of a reward: to a log, and the end of it for whoever asks."""

    def __init__(self, log: OutputLog | None) -> None:
        self._log = log
        self.tail = b""

    def write(self, output: bytes) -> None:
        """Take what a process has printed."""
        self.tail = (self.tail + output)[-4000:]
        if self._log is not None:
            self._log.write(output)


def payload(items: Sequence[RewardItem], binding: Binding) -> dict[str, Any]:
    """Build the payload of a `RewardHandler`: responses to one prompt, with what the function takes and nothing else.

    What all responses share, such as the columns of their row, is there once.
    """
    sources = {**binding.sources, **(_rest(items[0], binding) if binding.takes_rest else {})}
    values = {name: _values(items, source) for name, source in sources.items()}
    shared = {name: found[0] for name, found in values.items() if all(value is found[0] for value in found)}
    return {
        "num_responses": len(items),
        "one_at_a_time": binding.one_at_a_time,
        "num_positional": binding.num_positional,
        "order": list(values),
        "shared": shared,
        "lists": {name: found for name, found in values.items() if name not in shared},
    }


def _rest(item: RewardItem, binding: Binding) -> dict[str, str]:
    """Return the sources of what a function with **arguments takes beside those that it names."""
    used = set(binding.sources.values())
    rest = {COLUMN + name: name for name in item.columns}
    known = {source: SINGULAR[source] if binding.one_at_a_time else source for source in KNOWN if source not in used}
    found = {name: source for source, name in rest.items()} | {name: source for source, name in known.items()}
    if "responses" not in used:
        found |= {"responses": "responses", "completions": "responses"}
    return {name: source for name, source in found.items() if name not in binding.sources}


def _values(items: Sequence[RewardItem], source: str) -> list[Any]:
    """Return one value an item; the same object where all items share it."""
    if source.startswith(COLUMN):
        return [item.columns.get(source.removeprefix(COLUMN)) for item in items]
    match source:
        case "responses":
            return [item.response_text for item in items]
        case "labels":
            return [item.label for item in items]
        case "prompts":
            return [item.prompt_text for item in items]
        case "prompt_ids":
            return [item.prompt_id for item in items]
        case "finish_reasons":
            return [item.finish_reason for item in items]
        case "num_tokens":
            return [item.num_tokens for item in items]
        case "images":
            return [sources_of(items[0])] * len(items)
        case "data_source":
            return [item.prompt_id.rpartition(":")[0] for item in items]
        case _:
            assert source == "extra_info", source
            return [{}] * len(items)


def _scores(outcome: Outcome, num_items: int) -> list[tuple[Score, Mapping[str, Any]]]:
    """Convert the result of one call to scores, each with place and traceback where the function raised."""
    if outcome.status is not RewardStatus.OK:
        where = f" ({outcome.location})" if outcome.location else ""
        score = Score(None, outcome.status, detail=f"{outcome.detail}{where}", failure=str(outcome.failure))
        return [(score, {"place": outcome.location, "traceback": outcome.traceback})] * num_items
    assert isinstance(outcome.result, list)
    assert len(outcome.result) == num_items
    return [(score_of(value), value if isinstance(value, dict) else {}) for value in outcome.result]


def score_of(value: Any) -> Score:
    """Convert a `RewardHandler`'s value for one response to a score."""
    if not isinstance(value, dict):
        return Score(value)
    if "failure" in value:
        where = f" ({value['place']})" if value.get("place") else ""
        return Score(None, RewardStatus.FAILED, detail=f"{value['detail']}{where}", failure=value["failure"])
    steps = tuple((int(end), float(number)) for end, number in value["steps"])
    return Score(value["reward"], breakdown=value["parts"], steps=steps)
