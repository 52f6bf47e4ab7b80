"""What differs between ranks is named on all of them; contradictory variables and taken ports are refused."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import PeerError, PreflightError, RftError
from rft_dist.launch.environment import ranks_from_environment
from rft_dist.preflight import compare_ranks as preflight
from rft_dist.preflight import rank_facts
from rft_dist.preflight.compare_ranks import Report, Subject, compare_ranks
from rft_dist.preflight.process_checks import check_start, free_port, holder_of, refuse_taken_port
from rft_dist.preflight.rank_facts import code_hash, file_facts, fingerprint, machine_facts, model_facts, settings_facts

BY_HAND = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


class Table:
    """A store in this process; `slow` ranks never see what others write."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.rows[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.rows[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.rows for key in keys)


def place(rank: int, world_size: int) -> Any:
    return ranks_from_environment({**BY_HAND, "RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "NODE_RANK": f"{rank}"})


def compared(
    subjects: Mapping[int, Subject], seconds: float = 20.0, world_size: int = 0
) -> dict[int, Report | RftError]:
    """What every rank is told."""
    store, told = Table(), {}
    size = world_size or len(subjects)

    def take_part(rank: int) -> None:
        try:
            told[rank] = compare_ranks(store, place(rank, size), subjects[rank], seconds=seconds)
        except RftError as error:
            told[rank] = error

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in subjects]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


@pytest.fixture
def node(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Files of one machine, the same on each that is made."""

    def make(name: str) -> dict[str, Any]:
        folder = tmp_path / name
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps({"hidden_size": 8}))
        (folder / "model" / "model.safetensors").write_bytes(b"12345678")
        (folder / "train.jsonl").write_text('{"input": "1+1"}\n')
        (folder / "code").mkdir()
        (folder / "code" / "__init__.py").write_text("ANSWER = 1\n")
        return {"folder": folder, "settings": {"seed": 3, "train_batch_size": 64}, "machine": machine_facts()}

    return make


def subject(parts: Mapping[str, Any], run: Path) -> Subject:
    folder = parts["folder"]
    facts = dict(parts["machine"]) | settings_facts(parts["settings"]) | model_facts(folder / "model")
    facts |= file_facts({"prompt_data": folder / "train.jsonl", "code": folder / "code"})
    return Subject(facts, run)


def test_ranks_that_agree_are_told_how_much_was_compared(node: Callable, tmp_path: Path) -> None:
    subjects = {rank: subject(node(f"node{rank}"), tmp_path / "run") for rank in range(3)}
    told = compared(subjects)
    assert [type(report) for report in told.values()] == [Report] * 3
    report = told[2]
    assert isinstance(report, Report)
    assert (report.num_ranks, report.num_nodes) == (3, 3)
    assert report.num_facts > 20
    assert abs(report.clock_seconds) < 1.0
    assert [path.name for path in tmp_path.iterdir()].count("run") == 0
    assert not list(tmp_path.glob(".rft-preflight-*")), "the file that all looked at is gone"


def plant_python(parts: dict[str, Any], folder: Path) -> None:
    parts["machine"]["python"] = "3.12.1"


def plant_torch(parts: dict[str, Any], folder: Path) -> None:
    parts["machine"]["package torch"] = "2.12.0"


def plant_our_code(parts: dict[str, Any], folder: Path) -> None:
    parts["machine"]["code rft_algos"] = "0123456789ab"


def plant_a_users_code(parts: dict[str, Any], folder: Path) -> None:
    (folder / "code" / "__init__.py").write_text("ANSWER = 2\n")


def plant_setting(parts: dict[str, Any], folder: Path) -> None:
    parts["settings"] = {"seed": 4, "train_batch_size": 64}


def plant_data(parts: dict[str, Any], folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"input": "1+2"}\n')


def plant_model(parts: dict[str, Any], folder: Path) -> None:
    (folder / "model" / "config.json").write_text(json.dumps({"hidden_size": 9}))


def plant_missing_weights(parts: dict[str, Any], folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


PLANTED = {
    "python": plant_python,
    "package torch": plant_torch,
    "code rft_algos": plant_our_code,
    "file code": plant_a_users_code,
    "setting seed": plant_setting,
    "file prompt_data": plant_data,
    "model config.json": plant_model,
    "model weights": plant_missing_weights,
}


@pytest.mark.parametrize("name", PLANTED)
def test_one_of_eight_planted_differences_is_named_on_every_rank(name: str, node: Callable, tmp_path: Path) -> None:
    parts = [node(f"node{rank}") for rank in range(3)]
    PLANTED[name](parts[1], parts[1]["folder"])
    told = compared({rank: subject(part, tmp_path / "run") for rank, part in enumerate(parts)})
    for error in told.values():
        assert isinstance(error, PreflightError)
        assert "node 1 (" in error.problem.what
        assert "differs from node 0 (rank 0) in 1 thing" in error.problem.what
        assert "node 2" not in error.problem.what
        assert f"node 1: {name} | rank 0: " in error.problem.where


FACTS = sorted(machine_facts())
LIKE_EACH_OTHER: dict[str, tuple[object, object]] = {
    "a number and its text": (1, "1"),
    "a whole number and a float": (1, 1.0),
    "true and one": (True, 1),
    "nothing and its word": (None, "None"),
    "nothing and an empty text": (None, ""),
    "the last digit": (1e-6, 1.0000000000000002e-6),
    "zeros of two signs": (0.0, -0.0),
    "a pair and a list": ((0.9, 0.95), [0.9, 0.95]),
    "the order of a pair": ((0.9, 0.95), (0.95, 0.9)),
    "a space": ("a", "a "),
    "a letter of two forms": ("\u00e9", "e\u0301"),
    "a path and itself from the root": ("runs", "/runs"),
}


@pytest.mark.parametrize("name", FACTS)
def test_every_fact_of_a_machine_is_compared(name: str, node: Callable, tmp_path: Path) -> None:
    parts = [node(f"node{rank}") for rank in range(2)]
    parts[1]["machine"] = {**parts[1]["machine"], name: "another"}
    for error in compared({rank: subject(part, tmp_path / "run") for rank, part in enumerate(parts)}).values():
        assert isinstance(error, PreflightError)
        assert f"node 1: {name} | rank 0: " in error.problem.where
        assert "in 1 thing" in error.problem.what


@pytest.mark.parametrize("what", LIKE_EACH_OTHER)
def test_values_that_look_alike_are_told_apart(what: str, node: Callable, tmp_path: Path) -> None:
    parts = [node(f"node{rank}") for rank in range(2)]
    for part, value in zip(parts, LIKE_EACH_OTHER[what], strict=True):
        part["settings"] = {"seed": 3, "planted": value}
    for error in compared({rank: subject(part, tmp_path / "run") for rank, part in enumerate(parts)}).values():
        assert isinstance(error, PreflightError)
        assert "node 1: setting planted | rank 0: " in error.problem.where


@pytest.mark.parametrize("of", [0, 1])
def test_a_setting_that_one_rank_alone_has_is_a_difference(of: int, node: Callable, tmp_path: Path) -> None:
    parts = [node(f"node{rank}") for rank in range(2)]
    parts[of]["settings"] = {"seed": 3, "train_batch_size": 64, "planted": 1}
    for error in compared({rank: subject(part, tmp_path / "run") for rank, part in enumerate(parts)}).values():
        assert isinstance(error, PreflightError)
        assert "setting planted" in error.problem.where


def test_files_that_one_rank_of_a_machine_has_read_for_all_of_it_are_no_difference(
    node: Callable, tmp_path: Path
) -> None:
    subjects = {rank: subject(node(f"node{rank}"), tmp_path / "run") for rank in range(2)}
    of_settings = {name: fact for name, fact in subjects[1].facts.items() if not name.startswith("file ")}
    subjects[1] = Subject(of_settings, subjects[1].run_directory)
    assert [type(report) for report in compared(subjects).values()] == [Report] * 2


def test_all_differences_of_a_node_come_in_one_table(node: Callable, tmp_path: Path) -> None:
    parts = [node(f"node{rank}") for rank in range(2)]
    for plant in PLANTED.values():
        plant(parts[1], parts[1]["folder"])
    error = compared({rank: subject(part, tmp_path / "run") for rank, part in enumerate(parts)})[1]
    assert isinstance(error, PreflightError)
    assert "in 8 things" in error.problem.what
    assert "and 5 more the same on all nodes" in error.problem.do
    assert all(name in error.problem.where for name in PLANTED)


def test_a_folder_that_is_not_shared_is_named(node: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_FILE_SECONDS", 0.1)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    real = preflight._missing
    monkeypatch.setattr(preflight, "_missing", lambda path, want: real(tmp_path / "there" / path.name, want))
    told = compared({rank: subject(node(f"node{rank}"), tmp_path / "here" / "run") for rank in range(2)})
    for error in told.values():
        assert isinstance(error, PreflightError)
        assert f"folder {tmp_path / 'here'} | rank 0: holds the file that rank 0 wrote" in error.problem.where


def test_a_rank_that_never_publishes_is_named_within_the_limit(node: Callable, tmp_path: Path) -> None:
    told = compared({0: subject(node("node0"), tmp_path / "run")}, seconds=0.3, world_size=2)
    error = told[0]
    assert isinstance(error, PeerError)
    assert error.problem.what.startswith("rank 1 did not answer within 0.3 s")


def test_what_a_rank_knows_to_be_wrong_with_itself_is_told_to_all(node: Callable, tmp_path: Path) -> None:
    subjects = {rank: subject(node(f"node{rank}"), tmp_path / "run") for rank in range(2)}
    subjects[1] = Subject(subjects[1].facts, subjects[1].run_directory, ("gloo would listen at 127.0.1.1",))
    for error in compared(subjects).values():
        assert isinstance(error, PreflightError)
        assert "node 1: gloo would listen at 127.0.1.1" in error.problem.where


def test_a_rank_that_cannot_be_reached_is_named(
    node: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = {rank: subject(node(f"node{rank}"), tmp_path / "run") for rank in range(2)}
    port = free_port()
    real = Table.get

    def wrong_port(self: Table, key: str) -> bytes:
        return f"127.0.0.1 {port}".encode() if key == "listens/1" else real(self, key)

    monkeypatch.setattr(Table, "get", wrong_port)
    for error in compared(subjects).values():
        assert isinstance(error, PreflightError)
        assert f"rank 1 at 127.0.0.1:{port} cannot be reached from here: Connection refused" in error.problem.where


def test_clocks_that_are_apart_are_reported(node: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Table.set

    def early(self: Table, key: str, value: str) -> None:
        real(self, key, f"{float(value) - 30.0}" if key == "clock/answer/1" else value)

    monkeypatch.setattr(Table, "set", early)
    report = compared({rank: subject(node(f"node{rank}"), tmp_path / "run") for rank in range(2)})[0]
    assert isinstance(report, Report)
    assert 29.0 < report.clock_seconds < 31.0
    assert report.notes[0].startswith("the clock of rank 1 (")


def test_facts_see_any_byte_of_small_files_and_the_size_of_large_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"a" * 100)
    before = fingerprint(file)
    file.write_bytes(b"a" * 50 + b"b" + b"a" * 49)
    assert fingerprint(file) != before
    assert fingerprint(tmp_path / "none") == "absent"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("1")
    one = fingerprint(tmp_path / "folder")
    (tmp_path / "folder" / "x").rename(tmp_path / "folder" / "y")
    assert fingerprint(tmp_path / "folder") != one
    monkeypatch.setattr(rank_facts, "WHOLE_BYTES", 10)
    monkeypatch.setattr(rank_facts, "_BLOCK", 4)
    sampled = fingerprint(file)
    file.write_bytes(b"a" * 101)
    assert fingerprint(file) != sampled
    assert code_hash("rft_dist") != "absent"
    assert code_hash("no_such_package_at_all") == "absent"


ALONE = ranks_from_environment({})
NODES = {**BY_HAND, "MASTER_ADDR": "10.0.0.1", "RANK": "5", "WORLD_SIZE": "8", "NODE_RANK": "1", "NUM_NODES": "2"}
SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SRUN |= {"SLURM_STEP_NODELIST": "a[1-2]", "SLURM_STEP_NUM_NODES": "2"}
CONTRADICTORY: list[tuple[dict[str, str], set[str]]] = [
    ({**SRUN, "RANK": "0"}, {"RANK", "SLURM_PROCID"}),
    ({**SRUN, "WORLD_SIZE": "16"}, {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}),
    ({**SRUN, "LOCAL_RANK": "0"}, {"LOCAL_RANK", "SLURM_LOCALID"}),
    ({**SRUN, "NODE_RANK": "0"}, {"NODE_RANK", "SLURM_NODEID"}),
    ({**NODES, "LOCAL_WORLD_SIZE": "16"}, {"LOCAL_WORLD_SIZE", "WORLD_SIZE"}),
    ({**NODES, "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "4"}, {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}),
    ({**NODES, "NODE_RANK": "2"}, {"NODE_RANK", "NUM_NODES"}),
    ({**NODES, "GPUS_PER_NODE": "4", "LOCAL_WORLD_SIZE": "8"}, {"GPUS_PER_NODE", "LOCAL_WORLD_SIZE"}),
    ({**NODES, "MASTER_ADDR": "localhost"}, {"MASTER_ADDR"}),
    ({**NODES, "GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME"}),
    ({**NODES, "NCCL_SOCKET_IFNAME": "ib7"}, {"NCCL_SOCKET_IFNAME"}),
    ({**NODES, "GLOO_SOCKET_IFNAME": "wlan"}, {"GLOO_SOCKET_IFNAME"}),
    ({"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_0"}, {"NCCL_IB_DISABLE", "NCCL_IB_HCA"}),
    ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}, {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"}),
    (
        {"NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        {"NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"},
    ),
]


@pytest.mark.parametrize(("values", "names"), CONTRADICTORY, ids=lambda found: str(sorted(found)))
def test_one_of_fifteen_contradictory_sets_is_refused_by_its_names(values: dict[str, str], names: set[str]) -> None:
    with pytest.raises(PreflightError) as caught:
        check_start(ranks_from_environment(values), values, interfaces={"lo", "eth0"})
    problem = caught.value.problem
    assert problem.code == "launch.contradictory_environment"
    assert {part.partition("=")[0] for part in problem.what.split(", ")} == names
    assert problem.do


@pytest.mark.parametrize(
    "values",
    [
        {},
        NODES,
        SRUN,
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"NCCL_IB_DISABLE": "1"},
        {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "mlx5_0"},
        {**BY_HAND, "RANK": "1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"},
    ],
)
def test_what_can_work_is_let_through(values: dict[str, str]) -> None:
    ranks = ranks_from_environment(values)
    grid = check_start(ranks, values, interfaces={"lo", "eth0"})
    assert grid.world_size == ranks.world_size


def test_a_taken_port_is_named_with_its_holder_twenty_times() -> None:
    assert len(CONTRADICTORY) == 15
    for case in range(20):
        family, address = (socket.AF_INET, "127.0.0.1" if case % 4 == 0 else "0.0.0.0")
        if case % 2:
            family, address = socket.AF_INET6, "::"
        with socket.socket(family) as holder:
            holder.bind((address, 0))
            holder.listen()
            port = holder.getsockname()[1]
            ranks = ranks_from_environment({**BY_HAND, "MASTER_PORT": f"{port}", "RANK": "0", "WORLD_SIZE": "2"})
            with pytest.raises(PreflightError) as caught:
                refuse_taken_port(ranks)
            assert caught.value.problem.what.startswith(f"port {port} is held by pid {os.getpid()} (")
            assert caught.value.problem.do.startswith("export MASTER_PORT=")
        refuse_taken_port(ranks)


def test_only_rank_0_needs_the_port() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        values = {**BY_HAND, "MASTER_PORT": f"{holder.getsockname()[1]}", "RANK": "1", "WORLD_SIZE": "2"}
        check_start(ranks_from_environment(values), values, interfaces={"lo"})
        with pytest.raises(PreflightError) as caught:
            check_start(ranks_from_environment({**values, "RANK": "0"}), {**values, "RANK": "0"}, interfaces={"lo"})
        assert caught.value.problem.code == "launch.port_taken"
    assert holder_of(1) == "a process that cannot be seen from here"
