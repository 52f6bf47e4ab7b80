"""The manifest of a checkpoint: its bytes, what comes back from them, and what is refused."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace

import pytest

from rft_dist.checkpoint_format.file_operations import Digest
from rft_dist.checkpoint_format.manifest import (
    FileEntry,
    Manifest,
    ManifestFault,
    UnknownVersion,
    canonical_json,
    entry_from_json,
    entry_to_json,
    is_safe_path,
    parse_manifest,
)
from rft_dist.checkpoint_format.resharding import Block, StoredTensor
from rft_dist.checkpoints.reader import newest_verified

FIRST = FileEntry("model/a", Digest(16, "0" * 64, (1, 2)))
SECOND = FileEntry("state/opt/rank_00000-of-00002.safetensors", Digest(16, "1" * 64, ()))
PLAIN = Manifest(
    run_id="r",
    step=7,
    parent_step=None,
    sequence=3,
    components=("opt",),
    files=(FIRST, SECOND),
    metadata={"best": 0.5, "nested": [{"a": None}]},
    created="2026-01-01T00:00:00+00:00",
)
BLOCKS = (Block(SECOND.path, "w@0", (0,), (2,)), Block(SECOND.path, "w@2", (2,), (2,)))
SHARDED = replace(
    PLAIN,
    parent_step=4,
    sharded={"opt": {"w": StoredTensor("F32", (4,), BLOCKS)}},
)


@pytest.mark.parametrize(("manifest", "version"), [(PLAIN, 1), (SHARDED, 2)], ids=["plain", "sharded"])
def test_a_manifest_comes_back_from_its_bytes(manifest: Manifest, version: int) -> None:
    content = manifest.to_bytes()
    assert parse_manifest(content) == manifest
    assert (manifest.format_version, manifest.num_bytes) == (version, 32)
    body = json.loads(content)["manifest"]
    assert body["format_version"] == version
    assert ("sharded" in body) == (version == 2), "the first form has no such key"
    whole = {"manifest": body, "sha256": hashlib.sha256(canonical_json(body)).hexdigest()}
    assert content == json.dumps(whole, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def test_a_manifest_of_which_a_byte_differs_is_refused() -> None:
    content = SHARDED.to_bytes()
    for place in range(0, len(content), 3):
        with pytest.raises(ManifestFault):
            parse_manifest(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    for other in (content[:-1], content + b"\n", b" " + content, content.replace(b",", b", ", 1)):
        with pytest.raises(ManifestFault):
            parse_manifest(other)


def test_json_has_one_encoding_and_what_it_cannot_hold_is_refused() -> None:
    assert canonical_json({"b": [1, 0.5], "a": "\u00e4"}) == b'{"a":"\\u00e4","b":[1,0.5]}'
    for value in ({1: 2}, [{"a": ({2: 3},)}], {"a": {None: 1}}, {"a": object()}):
        with pytest.raises(TypeError):
            canonical_json(value)
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError):  # noqa: PT011 - the kind is what callers tell apart
            canonical_json([number])


def test_the_entry_of_a_file_comes_back_from_json_as_it_went_in() -> None:
    encoded = entry_to_json(FIRST)
    assert encoded == {"path": "model/a", "size": 16, "sha256": "0" * 64, "crc32_blocks": [1, 2]}
    assert entry_from_json(encoded) == FIRST
    assert entry_from_json({**encoded, "size": 0}).digest.size == 0
    changes = {"path": [1, "../a"], "size": [-1, True, "3"], "sha256": [1], "crc32_blocks": [{}, ["1"], [True], [1.0]]}
    for name, values in changes.items():
        for value in values:
            with pytest.raises(ManifestFault):
                entry_from_json({**encoded, name: value})
    for other in ([], {name: value for name, value in encoded.items() if name != "size"}):
        with pytest.raises(ManifestFault):
            entry_from_json(other)


@pytest.mark.parametrize("path", ["a", "a/b", "model/manifest.json", "...", "a.b/.c"])
def test_a_file_name_inside_of_the_directory_is_allowed(path: str) -> None:
    assert is_safe_path(path)


def forged(body_changes: dict) -> bytes:
    """A manifest whose own hash is right."""
    entry = {"path": "model/a", "size": 16, "sha256": "0" * 64, "crc32_blocks": [1]}
    body = {
        "components": [],
        "created": "2026-01-01T00:00:00+00:00",
        "files": [entry],
        "format_version": 1,
        "metadata": {},
        "parent_step": None,
        "run_id": "r",
        "sequence": 1,
        "step": 1,
    }
    if "path" in body_changes:
        entry["path"] = body_changes.pop("path")
    body.update(body_changes)
    return canonical_json({"manifest": body, "sha256": hashlib.sha256(canonical_json(body)).hexdigest()}) + b"\n"


def test_a_forged_manifest_of_the_right_form_is_read() -> None:
    assert parse_manifest(forged({})).files[0].path == "model/a"


@pytest.mark.parametrize(
    "path", ["../a", "/etc/passwd", "model/../../a", "a//b", "./a", "", "a\0b", "a\\b", "manifest.json"]
)
def test_a_file_name_that_leaves_the_directory_is_refused(path: str) -> None:
    with pytest.raises(ManifestFault, match="leaves the directory or is reserved"):
        parse_manifest(forged({"path": path}))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": True},
        {"step": "1"},
        {"format_version": 2},
        {"files": {}},
        {"files": [1]},
        {"components": ["../x"]},
        {"metadata": []},
        {"parent_step": "0"},
        {"sequence": 1.0},
    ],
)
def test_a_manifest_of_another_form_is_refused(changes: dict) -> None:
    with pytest.raises(ManifestFault):
        parse_manifest(forged(changes))


def test_a_checkpoint_of_a_later_form_is_left_where_it_is(small_run) -> None:
    small_run.save(small_run.store(), 1)
    info = small_run.save(small_run.store(), 2)
    (info.path / "manifest.json").write_bytes(forged({"format_version": 3, "step": 2}))
    search = newest_verified(small_run.directory)
    assert search.checkpoint is not None
    assert search.checkpoint.step == 1
    assert "format version 3, this program reads up to 2" in str(search.findings[0])
    assert info.path.is_dir(), "it is not damaged"


@pytest.mark.parametrize(
    "table",
    [
        {},
        [],
        {"optimizer": {"w": ["F32", [4], [["../../x", [0], [4]]]]}},
        {"optimizer": {"w": ["F32", [4], [["model/b", [0], [4]]]]}},
        {"other": {"w": ["F32", [4], [["model/a", [0], [4]]]]}},
        {"optimizer": {"w": ["F33", [4], [["model/a", [0], [4]]]]}},
        {"optimizer": {"w": ["F32", [4], [["model/a", [1], [4]]]]}},
        {"optimizer": {"w": ["F32", [-4], [["model/a", [0], [4]]]]}},
        {"optimizer": {"w": ["F32", [True], [["model/a", [0], [1]]]]}},
        {"optimizer": {"w": ["F32", [4], [["model/a", [0, 0], [4]]]]}},
        {"optimizer": {"w": ["F32", [4]]}},
        {"optimizer": {"w": 1}},
        {"optimizer": {"w": [["F32"], [4], [["model/a", [0], [4]]]]}},
        {"optimizer": {"w": [{}, [4], [["model/a", [0], [4]]]]}},
        {"optimizer": {"w": ["F32", [4], [["model/a", [0], [3]]]]}},
        {"optimizer": {"w": ["F32", [4], []]}},
        {"optimizer": {"w": ["F32", [4], [["model/a", [0], [3]], ["model/a", [2], [2]]]]}},
        {"optimizer": {"w": ["F64", [4], [["model/a", [0], [4]]]]}},
        {"optimizer": {"w": ["I8", [10**12], [["model/a", [0], [10**12]]]]}},
        {"optimizer": {"w": ["I8", [3, 5000], [["model/a", [0, column], [3, 1]] for column in range(5000)] * 2]}},
    ],
    ids=itertools.count(),
)
def test_a_table_of_blocks_of_another_form_is_refused(table) -> None:
    good = {"optimizer": {"w": ["F32", [4], [["model/a", [0], [4]]]]}}
    form = {"components": ["optimizer"], "format_version": 2}
    assert parse_manifest(forged({**form, "sharded": good})).sharded["optimizer"]["w"].shape == (4,)
    with pytest.raises(ManifestFault):
        parse_manifest(forged({**form, "sharded": table}))


def test_names_of_files_that_differ_in_case_alone_are_refused() -> None:
    upper = FileEntry("Model/A", Digest(16, "0" * 64, (1, 2)))
    with pytest.raises(ManifestFault, match="case alone"):
        parse_manifest(replace(PLAIN, files=(upper, FIRST, SECOND)).to_bytes())


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"manifest":{},"sha256":""}\n']
)
def test_content_that_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(ManifestFault):
        parse_manifest(content)


def test_a_form_that_is_not_known_yet_is_told_from_damage() -> None:
    with pytest.raises(UnknownVersion) as later:
        parse_manifest(forged({"format_version": 3}))
    assert not later.value.is_damage
    for version in (0, -1, True, 1.0, "1", None):
        with pytest.raises(ManifestFault) as caught:
            parse_manifest(forged({"format_version": version}))
        assert caught.value.is_damage


@pytest.mark.parametrize("names", [["model/b", "model/a"], ["model/a", "model/a"]])
def test_files_are_sorted_and_each_is_listed_once(names: list[str]) -> None:
    entries = [{**entry_to_json(FIRST), "path": name} for name in names]
    assert len(parse_manifest(forged({"files": sorted(entries, key=str)[:1]})).files) == 1
    with pytest.raises(ManifestFault):
        parse_manifest(forged({"files": entries}))
