"""The trainer's side of a replica: what its process is asked, with which deadlines, and what a restart does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core import fault_points
from rft_core.errors import ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.process.client import EngineDied
from rft_engine.replicas import process as module
from rft_engine.replicas.interrupt_flag import InterruptFlag
from rft_engine.replicas.process import ProcessReplica, ReplicaLimits, ReplicaProcess, is_lost
from rft_engine.weight_sync.shared_memory import WeightSnapshot

FACTS = {"dtype": "bfloat16", "vocab_size": 7, "is_cpu": False, "transport": "file"}
SNAPSHOT = WeightSnapshot(3, Path("weights"), {"a": "1", "b": "2"}, 0)
CALL = SampleRequests([(1,), (2,)], [10, 11], [0, 0], [2, 2], SamplingOptions(temperature=1.0, max_new_tokens=2))


class Scripted:
    """A process that keeps what it is asked and answers as a started replica does."""

    made: list[Scripted]

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.given = (command, environment, log_path)
        self.pid = 100 + len(self.made)
        self.asked: list[Any] = []
        self.flag: InterruptFlag | None = None
        self.held = {"a": "1", "b": "2"}
        self.fails_to_start = False
        self.num_kills = 0
        self.made.append(self)

    def call(self, operation: str, seconds: float, **fields: Any) -> Any:
        self.asked.append((operation, seconds, fields))
        if operation == "start":
            self.flag = InterruptFlag(fields["flag"])
            if self.fails_to_start:
                raise died()
            return FACTS
        return self.held if operation == "load" else None

    def stream(self, operation: str, seconds: float, **fields: Any) -> Iterator[Any]:
        self.asked.append((operation, seconds, fields))
        for request in range(len(fields["prefixes"])):
            yield None
            result = SampledTokens(request, (1, 2), (-1.0, -2.0), (0.0, 0.0), "length", 3)
            yield {name: getattr(result, name) for name in SampledTokens.__dataclass_fields__} | {
                name: list(getattr(result, name)) for name in ("token_ids", "logprobs", "log_kept_mass")
            }

    def kill(self) -> None:
        self.num_kills += 1


def died() -> EngineDied:
    return EngineDied(code="engine.died", what="", where="", why="", do="")


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Scripted]:
    Scripted.made = []
    monkeypatch.setattr(module, "ReplicaProcess", Scripted)
    return Scripted.made


def replica_of(folder: Path, **given: Any) -> ProcessReplica:
    return ProcessReplica(4, ["run", "me"], {"size": 9}, max_rows=2, max_len=8, log_path=folder / "a" / "log", **given)


def started(folder: Path, **given: Any) -> ProcessReplica:
    replica = replica_of(folder, **given)
    replica.ready()
    replica.load(SNAPSHOT)
    return replica


def test_a_replica_resumes_and_reads_files_and_silence_alone_ends_its_calls() -> None:
    assert ProcessReplica.can_resume
    assert ProcessReplica.reads_files
    assert ReplicaProcess.renews_deadline
    assert ReplicaLimits() == ReplicaLimits(start=900.0, silence=600.0, load=600.0, other=120.0)


def test_each_request_goes_out_with_its_fields_and_its_deadline(tmp_path: Path, processes: list[Scripted]) -> None:
    replica = replica_of(tmp_path, environment={"A": "b"}, limits=ReplicaLimits(1.0, 2.0, 3.0, 4.0))
    [process] = processes
    assert process.given == (("run", "me"), {"A": "b"}, tmp_path / "a" / "log")
    assert (tmp_path / "a").is_dir()
    assert (replica.number, replica.pid) == (4, 100)
    with pytest.raises(AssertionError):
        _ = replica.facts
    replica.ready()
    assert replica.facts == EngineFacts("bfloat16", 7, False, "file")
    [(operation, seconds, fields)] = process.asked
    flag = Path(fields.pop("flag"))
    assert not flag.exists(), "its name goes once both sides have mapped it"
    assert (operation, seconds, fields) == ("start", 1.0, {"model": {"size": 9}, "max_rows": 2, "max_len": 8})
    process.asked = []
    replica.load(SNAPSHOT)
    assert [one.token_ids for one in replica.draw(CALL)] == [(1, 2)] * 2
    assert len(list(replica.draw(CALL.part([1])))) == 1
    replica.sleep(2)
    replica.wake()
    assert process.asked == [
        ("load", 3.0, {"path": "weights", "version": 3}),
        ("draw", 2.0, {"number": 1, **CALL.fields()}),
        ("draw", 2.0, {"number": 2, **CALL.part([1]).fields()}),
        ("sleep", 4.0, {"level": 2}),
        ("wake", 4.0, {}),
    ]
    assert process.num_kills == 0
    replica.close()
    assert process.num_kills == 1


def test_without_an_environment_or_limits_there_are_none_besides_the_usual(
    tmp_path: Path, processes: list[Scripted]
) -> None:
    started(tmp_path)
    assert processes[0].given[1] == {}
    assert [seconds for _, seconds, _ in processes[0].asked] == [900.0, 600.0]


def test_an_interrupt_ends_the_call_under_way_and_none_after_it(tmp_path: Path, processes: list[Scripted]) -> None:
    replica = started(tmp_path)
    flag = processes[0].flag
    assert flag is not None
    replica.interrupt()
    assert not flag.reached(1), "no call was under way"
    for number in (1, 2):
        drawing = replica.draw(CALL)
        next(drawing)
        assert not flag.reached(number)
        replica.interrupt()
        assert flag.reached(number)
        assert not flag.reached(number + 1)
        list(drawing)


def test_a_restart_is_another_process_with_a_flag_of_its_own(tmp_path: Path, processes: list[Scripted]) -> None:
    replica = started(tmp_path)
    for _ in range(3):
        list(replica.draw(CALL))
    replica.interrupt()
    replica.restart(lambda: SNAPSHOT)
    first, second = processes
    assert (first.num_kills, second.num_kills) == (1, 0)
    assert second.given == first.given
    assert [operation for operation, _, _ in second.asked] == ["start"], "weights come with the next load"
    assert replica.pid == 101
    assert second.flag is not None
    assert not second.flag.reached(1), "the first call of the new process is not ended"
    list(replica.draw(CALL))
    assert second.asked[-1][2]["number"] == 1


def test_the_name_of_the_flag_goes_also_when_a_start_fails(tmp_path: Path, processes: list[Scripted]) -> None:
    replica = replica_of(tmp_path)
    processes[0].fails_to_start = True
    with pytest.raises(EngineDied):
        replica.ready()
    assert not Path(processes[0].asked[0][2]["flag"]).exists()


@pytest.mark.parametrize("held", [{"a": "1", "b": "3"}, {"a": "1", "b": "2", "c": "4"}])
def test_a_load_that_did_not_arrive_is_refused(tmp_path: Path, processes: list[Scripted], held: dict[str, str]) -> None:
    replica = replica_of(tmp_path)
    replica.ready()
    processes[0].held = held
    with pytest.raises(ServiceError) as caught:
        replica.load(SNAPSHOT)
    assert caught.value.problem.code == "engine.logprob_parity"
    with pytest.raises(ServiceError) as caught:
        list(replica.draw(CALL))
    assert caught.value.problem.code == "engine.garbage", "results of a version that was never loaded"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (died(), True),
        (ServiceError(code="engine.deadline", what="", where="", why="", do=""), True),
        (ServiceError(code="engine.garbage", what="", where="", why="", do=""), True),
        (ServiceError(code="engine.weights.incomplete", what="", where="", why="", do=""), False),
    ],
)
def test_which_errors_mean_that_a_replica_is_gone(error: ServiceError, lost: bool) -> None:
    assert is_lost(error) is lost
    assert module.POINT_DRAWN in fault_points.declared()
