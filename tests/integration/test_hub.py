"""Models and data by their names on a hub, which this test serves on loopback: what is fetched, and what goes wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub.utils import close_session
from support.hub_server import TOKEN, Hub, ask_in_place_of_the_hub, running_hub

from rft.hub import download
from rft.hub.dataset_files import dataset_files
from rft.hub.download import commit_of
from rft.hub.hub_names import HubName, dataset_name, model_name
from rft.hub.model_files import listed_model, model_directory
from rft.hub.run_settings import (
    local_directory,
    local_settings,
    pinned,
    with_local_models,
    with_model_directories,
)
from rft.hub.sources import located_sources
from rft.hub.upload import push, refuse_target
from rft_cli.config.resolve import resolve
from rft_core.errors import RftError, ServiceError
from rft_trainer.data.sources import load_prompts

MODEL = {
    "README.md": b"# tiny",
    "config.json": b"{}",
    "model.safetensors": b"w" * 200_000,
    "tokenizer.json": b'{"a": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickled",
    "modeling_tiny.py": b"raise SystemExit",
    "consolidated.safetensors": b"again",
    "onnx/model.onnx": b"o",
}
TAKEN = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
ROWS = b'{"question": "1+1?", "answer": "#### 2"}\n'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model and a data set, an empty cache, no token, and limits of time of a second."""
    with running_hub() as served:
        ask_in_place_of_the_hub(served, tmp_path, monkeypatch)
        served.add("model", "o/tiny", MODEL)
        served.add("dataset", "o/sums", {"train.jsonl": ROWS, "test.jsonl": ROWS, "load.py": b"raise SystemExit"})
        yield served
    close_session()


def named(text: str) -> HubName:
    name = model_name(text)
    assert name is not None
    return name


def fetch(text: str = "o/tiny") -> Path:
    name = named(text)
    return model_directory(name.at(commit_of(name, "--pretrain")), "--pretrain")


def refusal(text: str = "o/tiny") -> RftError:
    with pytest.raises(RftError) as caught:
        fetch(text)
    return caught.value


def names_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_a_model_is_fetched_once_without_pickles_and_code(hub: Hub) -> None:
    folder = fetch()
    assert names_in(folder) == TAKEN
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert len(hub.downloads()) == len(TAKEN)
    hub.requests.clear()
    assert fetch() == folder
    assert [path for _, path in hub.requests] == ["/api/models/o/tiny/revision/main"], "only the commit is asked for"
    hub.requests.clear()
    assert fetch(f"o/tiny@{folder.name}") == folder
    assert hub.requests == [], "a commit that is here needs no request"


def test_the_configuration_is_fetched_without_the_weights_where_they_are_not_read(hub: Hub) -> None:
    name = named("o/tiny")
    folder = model_directory(name.at(commit_of(name, "--pretrain")), "--pretrain", weights=False)
    assert names_in(folder) == [file for file in TAKEN if not file.endswith(".safetensors")]


def test_weights_are_listed_with_their_sizes_and_not_fetched_and_those_that_are_here_are_not_listed(hub: Hub) -> None:
    name = named("o/tiny")
    name = name.at(commit_of(name, "--pretrain"))
    folder, sizes = listed_model(name, "--pretrain")
    assert sizes == {"model.safetensors": 200_000}
    assert names_in(folder) == [file for file in TAKEN if not file.endswith(".safetensors")]
    fetch()
    assert listed_model(name, "--pretrain") == (folder, {})
    hub.add("model", "o/pickled", {"config.json": b"{}", "pytorch_model.bin": b"p"})
    name = named("o/pickled")
    with pytest.raises(RftError) as caught:
        listed_model(name.at(commit_of(name, "--pretrain")), "--pretrain")
    assert caught.value.problem.code == "hub.no_safetensors"


def test_a_branch_that_moved_is_another_commit_and_only_new_files_are_fetched(hub: Hub) -> None:
    first = fetch()
    hub.add("model", "o/tiny", {**MODEL, "config.json": b'{"n": 2}'})
    hub.requests.clear()
    second = fetch()
    assert (first.name != second.name, (second / "config.json").read_bytes()) == (True, b'{"n": 2}')
    assert [path.rpartition("/")[2] for path in hub.downloads()] == ["config.json"]
    assert fetch(f"o/tiny@{first.name}") == first


def test_files_of_a_split_are_fetched_alone(hub: Hub) -> None:
    name = dataset_name("o/sums")
    assert name is not None
    name = name.at(commit_of(name, "--prompt_data"))
    [file] = dataset_files(name, "train", "--prompt_data")
    assert (file.name, file.read_bytes()) == ("train.jsonl", ROWS)
    assert [path.rpartition("/")[2] for path in hub.downloads()] == ["train.jsonl"]


def test_settings_get_commits_and_then_directories_and_keep_their_origins(hub: Hub) -> None:
    words = ["--pretrain", "o/tiny", "--reward_pretrain", "o/tiny,second=o/tiny@main", "--prompt_data", "o/sums"]
    given = resolve("rl", [*words, "--seed", "7"])
    fixed = pinned(given)
    model, data = (hub.repositories[key].refs["main"] for key in (("model", "o/tiny"), ("dataset", "o/sums")))
    assert fixed.values["pretrain"] == fixed.settings.model.pretrain == f"o/tiny@{model}"
    assert fixed.values["reward_pretrain"] == f"o/tiny@{model},second=o/tiny@{model}"
    assert fixed.values["prompt_data"] == f"o/sums@{data}"
    assert fixed.origins == given.origins
    lines = [line for line in fixed.config_yaml.splitlines() if line not in given.config_yaml.splitlines()]
    assert [line.split("#")[0].split() for line in lines] == [
        ["pretrain:", f"o/tiny@{model}"],
        ["prompt_data:", f"o/sums@{data}"],
        ["reward_pretrain:", f"o/tiny@{model},second=o/tiny@{model}"],
    ]
    hub.requests.clear()
    assert pinned(fixed) is fixed
    assert hub.requests == [], "commits are not asked for again"
    local = with_local_models(fixed)
    folder = local.settings.model.pretrain
    assert names_in(Path(folder)) == TAKEN
    assert local.values["reward_pretrain"] == f"tiny={folder},second={folder}"
    assert local.values["prompt_data"] == f"o/sums@{data}", "rows are found where they are read"
    assert with_model_directories(fixed.settings) == local.settings
    assert local_directory("o/tiny", "--model") == folder
    assert local_directory("./tiny", "--model") == "./tiny"


def test_settings_that_name_no_hub_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    given = resolve("sft", ["--pretrain", str(tmp_path / "m"), "--prompt_data", "train.jsonl"])
    assert local_settings(given) is given


def test_sources_stand_for_their_files_under_a_name_without_the_commit(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_bytes(ROWS)
    specs = located_sources("own.jsonl,o/sums", "0.5,0.5", split="test", flag="--eval_data")
    found = [(spec.name, [file.name for file in spec.files]) for spec in specs]
    assert found == [("own", []), ("o/sums", ["test.jsonl"])]
    assert [spec.probability for spec in specs] == [0.5, 0.5]
    loaded = load_prompts(specs, split="test", input_key="input", label_key="label")
    assert [(row.prompt_id, row.label) for row in loaded.prompts] == [("own:0", "#### 2"), ("o/sums:0", "#### 2")]
    assert len(loaded.notes) == 2
    twice = located_sources("o/sums,o/sums@main", split="test", flag="--eval_data")
    assert len({spec.name for spec in twice}) == 2


def test_a_cut_connection_goes_on_inside_the_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    # what has come of a piece that is cut off is lost: pieces of 10 MB are larger than the file
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.cuts["model.safetensors"] = [70_000, 50_000]
    assert (fetch() / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert hub.ranges == ["bytes=70000-", "bytes=120000-"]


def test_a_download_that_was_broken_off_goes_on_with_what_is_missing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cuts["model.safetensors"] = [0] * 20
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    error = refusal()
    assert (type(error), error.problem.code) == (ServiceError, "hub.cut")
    hub.cuts.clear()
    hub.requests.clear()
    assert names_in(fetch()) == TAKEN
    assert [path.rpartition("/")[2] for path in hub.downloads()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("text", "code"),
    [("o/nothing", "hub.unknown"), ("o/tiny@v9", "hub.unknown_revision"), ("o/sums", "hub.unknown")],
)
def test_an_unknown_name_or_revision_is_said(hub: Hub, text: str, code: str) -> None:
    assert refusal(text).problem.code == code


def test_a_path_with_a_typing_error_is_told_as_a_path(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    problem = refusal("model/tiny").problem
    assert (problem.code, problem.do) == ("hub.unknown", "--pretrain models/tiny")


def test_private_and_gated_repositories_ask_for_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("model", "o/gated", MODEL, refusal="gated")
    hub.add("model", "o/private", MODEL, refusal="private")
    for text, code in (("o/gated", "hub.gated"), ("o/private", "hub.unknown")):
        problem = refusal(text).problem
        assert (problem.code, "hf auth login" in problem.do) == (code, True)
    # a wrong token is refused by other words than none
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 20)
    for text, code in (("o/gated", "hub.gated"), ("o/private", "hub.refused")):
        problem = refusal(text).problem
        assert problem.code == code
        assert "hf_x" not in problem.as_text()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert names_in(fetch("o/private")) == TAKEN


def test_a_slow_and_an_absent_hub_are_told_with_the_way_without_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.delay = 1.5
    problem = refusal().problem
    assert (problem.code, "HF_HUB_DOWNLOAD_TIMEOUT=6" in problem.do) == ("hub.slow", True)
    hub.delay = 0.0
    hub.status = 503
    assert "same command" in refusal().problem.do
    assert refusal().problem.code == "hub.unreachable"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    problem = refusal().problem
    assert (problem.code, problem.do.startswith("hf download o/tiny --local-dir tiny")) == ("hub.unreachable", True)


def test_a_cache_that_cannot_be_written_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    problem = refusal().problem
    assert (problem.code, "HF_HOME" in problem.do) == ("hub.cache_refused", True)


def test_the_cache_does_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch() == folder, "an absent hub is told, and the commit of the cache is taken"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert fetch() == folder
    assert refusal("o/other").problem.code == "hub.not_in_cache"
    (folder / "model.safetensors").unlink()
    problem = refusal().problem
    assert (problem.code, "model.safetensors" in problem.what) == ("hub.not_in_cache", True)
    assert hub.requests == []


def test_what_another_program_put_into_the_cache_is_used_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch()
    (tree,) = (folder.parent.parent / "trees").glob("*.json")
    tree.unlink()
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch() == folder


def test_a_model_without_safetensors_is_refused_before_anything_large_is_fetched(hub: Hub) -> None:
    hub.add("model", "o/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x" * 1000})
    assert refusal("o/pickled").problem.code == "hub.no_safetensors"
    assert [path.rpartition("/")[2] for path in hub.downloads()] == ["config.json"]


def test_one_of_several_at_a_time_fetches_a_model(hub: Hub) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(fetch())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(folders) == len(threads)
    assert len(hub.downloads()) == len(TAKEN)


def test_progress_is_told_in_two_lines(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=download.__name__):
        fetch()
    lines = [record.getMessage() for record in caplog.records if record.name == download.__name__]
    assert [line.split()[0] for line in lines] == ["downloading", "downloaded"]
    assert all(getattr(record, "aside", False) for record in caplog.records if record.name == download.__name__)


def test_an_export_is_uploaded_as_one_commit_into_a_new_private_repository(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes(MODEL[name])
    refuse_target("me/new")
    (line,) = push(model, "me/new", private=True)
    repository = hub.repositories["model", "me/new"]
    commit = repository.refs["main"]
    assert repository.commits[commit] == {name: MODEL[name] for name in ("config.json", "model.safetensors")}
    assert (repository.refusal, commit in line) == ("private", True)
    assert TOKEN not in json.dumps(hub.requests)


def test_an_upload_that_cannot_be_is_refused_before_it_and_told_with_the_export_that_stays(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(b"{}")
    for repo in ("no-organisation", "me/new"):
        with pytest.raises(RftError) as caught:
            refuse_target(repo)
        assert caught.value.problem.code == "hub.push_target"
    for token, status in (("hf_" + "x" * 20, 0), (TOKEN, 500)):
        monkeypatch.setenv("HF_TOKEN", token)
        hub.status = status
        with pytest.raises(RftError) as caught:
            push(tmp_path / "model", "me/new", private=True)
        problem = caught.value.problem
        assert (problem.code, str(tmp_path / "model") in problem.state) == ("hub.push", True)
        assert token not in problem.as_text()
