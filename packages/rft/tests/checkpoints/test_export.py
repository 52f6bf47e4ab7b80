"""Exports of a checkpoint: equal to what they were made from, converted where that is asked, or not written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft.checkpoints import ema_weights, export, export_lora
from rft_core.errors import CheckpointError, DataError, OptionsError
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_models.lora import files
from rft_models.lora.adapters import AdapterRules
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    return build_character_model(
        tmp_path_factory.mktemp("export") / "m", hidden=16, layers=1, heads=2, kv_heads=1, ffn=24, seed=0
    )


@pytest.fixture(scope="module")
def adapted(model: Path) -> Path:
    """The model with trained adapters, as a checkpoint holds it: merged weights, and the adapters below them."""
    policy = load_policy(model)
    adapters = add_adapters(policy, AdapterRules(2), seed=1, base=model)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(adapters.named_parameters()):
            parameter.add_(0.01 * (number + 1))
    policy.save_pretrained(model.parent / "adapted")
    return model.parent / "adapted"


class Averages:
    """Tensors of an optimizer's state by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.table, self._tensors = dict.fromkeys(tensors), tensors

    def full_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def checkpoint(folder: Path, averages: dict[str, torch.Tensor] | None = None) -> Any:
    def blocks(component: str) -> Averages:
        assert component == "optimizer"
        return Averages({"exp_avg/x": torch.zeros(1)} | (averages or {}))

    return SimpleNamespace(step=7, path=Path("run/checkpoints/step_7"), model_directory=folder, blocks=blocks)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> dict[Path, Any]:
    """The checkpoints that can be found, by the path that is asked for."""
    known: dict[Path, Any] = {}

    def resolve(path: Path, asked_by: str) -> Any:
        assert asked_by == "rft-train export"
        return SimpleNamespace(checkpoint=known[path])

    monkeypatch.setattr(export, "resolve_checkpoint", resolve)
    monkeypatch.setattr(export_lora, "resolve_checkpoint", resolve)
    return known


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "model.safetensors"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_export_has_the_bytes_and_the_type_of_its_checkpoint(
    model: Path, tmp_path: Path, found: dict[Path, Any], dtype: torch.dtype
) -> None:
    source = tmp_path / "source"
    load_policy(model, dtype=dtype).save_pretrained(source)
    found[Path("run")] = checkpoint(source)
    lines = export.export(Path("run"), tmp_path / "out")
    assert same(tensors_of(tmp_path / "out"), tensors_of(source))
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {dtype}
    record = json.loads(lines[3])
    assert (record["step"], record["directory"], len(record["sha256"])) == (7, str(tmp_path / "out"), 64)
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert f"{size / 1e6:,.1f} MB, {len(tensors_of(source))} tensors" in lines[1]
    again = json.loads(export.export(Path("run"), tmp_path / "again")[3])
    assert again["sha256"] == record["sha256"]
    changed = tensors_of(source)
    next(iter(changed.values())).view(-1)[0] += 1.0
    save_file(changed, str(source / "model.safetensors"), metadata={"format": "pt"})
    assert json.loads(export.export(Path("run"), tmp_path / "third")[3])["sha256"] != record["sha256"]


def test_weights_are_converted_where_a_type_is_asked_for(model: Path, tmp_path: Path, found: dict[Path, Any]) -> None:
    found[Path("run")] = checkpoint(model)
    lines = export.export(Path("run"), tmp_path / "out", "bfloat16")
    assert "BF16" in lines[1]
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(model).items()}
    assert same(tensors_of(tmp_path / "out"), expected)


def test_the_widest_type_of_the_tensors_is_that_of_the_export(
    model: Path, tmp_path: Path, found: dict[Path, Any]
) -> None:
    source = tmp_path / "source"
    load_policy(model, dtype=torch.bfloat16).save_pretrained(source)
    mixed = tensors_of(source)
    name = next(name for name in mixed if "norm" in name)
    mixed[name] = mixed[name].float()
    save_file(mixed, str(source / "model.safetensors"), metadata={"format": "pt"})
    found[Path("run")] = checkpoint(source)
    export.export(Path("run"), tmp_path / "out")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {torch.float32}


def spoil(monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    """Change what is written, between its writing and its comparison."""
    written = CausalPolicy.save_pretrained

    def spoiled(self: CausalPolicy, directory: Path) -> None:
        written(self, directory)
        tensors = tensors_of(directory)
        how(tensors)
        save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})

    monkeypatch.setattr(CausalPolicy, "save_pretrained", spoiled)


def _flip(tensors: dict[str, torch.Tensor]) -> None:
    last = tensors[sorted(tensors)[-1]].view(-1)
    last.view(torch.int32)[-1] ^= 1


def _negative_zero(tensors: dict[str, torch.Tensor]) -> None:
    tensors[sorted(tensors)[0]].view(-1)[0] = 0.0


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].reshape(1, -1)


@pytest.mark.parametrize("how", [_flip, _reshape, lambda tensors: tensors.popitem()])
def test_what_does_not_read_back_as_it_was_is_not_written(
    model: Path, tmp_path: Path, found: dict[Path, Any], monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    found[Path("run")] = checkpoint(model)
    spoil(monkeypatch, how)
    with pytest.raises(DataError) as caught:
        export.export(Path("run"), tmp_path / "out")
    assert caught.value.problem.code == "export.differs"
    assert list(tmp_path.iterdir()) == []


def test_zeros_of_two_signs_are_two_values_and_nan_is_itself(
    model: Path, tmp_path: Path, found: dict[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    load_policy(model).save_pretrained(source)
    tensors = tensors_of(source)
    tensors[sorted(tensors)[0]].view(-1)[0] = -0.0
    save_file(tensors, str(source / "model.safetensors"), metadata={"format": "pt"})
    found[Path("run")] = checkpoint(source)
    spoil(monkeypatch, _negative_zero)
    with pytest.raises(DataError):
        export.export(Path("run"), tmp_path / "out")
    monkeypatch.setattr(export, "logprob_difference", lambda first, second: 1e-9)
    spoil(monkeypatch, lambda tensors: None)
    with pytest.raises(DataError):
        export.export(Path("run"), tmp_path / "out")


def averages_of(policy: CausalPolicy) -> dict[str, torch.Tensor]:
    return {f"ema/{name}": parameter.detach() + 0.5 for name, parameter in policy.named_parameters()}


def test_averages_take_the_place_of_the_weights(model: Path, tmp_path: Path, found: dict[Path, Any]) -> None:
    averages = averages_of(load_policy(model))
    found[Path("run")] = checkpoint(model, averages)
    export.export(Path("run"), tmp_path / "out", averages=True)
    parameters = {f"ema/{name}": part for name, part in load_policy(tmp_path / "out").named_parameters()}
    assert same({name: part.detach() for name, part in parameters.items()}, averages)
    # a weight that is not averaged stays as it is
    name, average = next(iter(averages.items()))
    found[Path("run")] = checkpoint(model, {name: average})
    export.export(Path("run"), tmp_path / "one", averages=True)
    changed = {
        own for own, tensor in tensors_of(tmp_path / "one").items() if not torch.equal(tensor, tensors_of(model)[own])
    }
    assert changed == {name.removeprefix("ema/")}


@pytest.mark.parametrize("extra", [None, "ema/none"])
def test_averages_that_are_not_there_or_of_another_model_are_refused(
    model: Path, tmp_path: Path, found: dict[Path, Any], extra: str | None
) -> None:
    averages = averages_of(load_policy(model)) | {extra: torch.zeros(1)} if extra else {}
    found[Path("run")] = checkpoint(model, averages)
    with pytest.raises(OptionsError) as caught:
        export.export(Path("run"), tmp_path / "out", averages=True)
    assert caught.value.problem.code == "export.no_averages"
    assert ("the first none" in caught.value.problem.what) is bool(extra)


def adapter_averages(folder: Path) -> dict[str, torch.Tensor]:
    policy = export_lora.load_adapted(folder / files.FOLDER)
    assert policy.adapters is not None
    return {f"ema/{name}": parameter.detach() * 0.5 for name, parameter in policy.adapters.named_parameters()}


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_averaged_adapters_are_folded_in(adapted: Path, tmp_path: Path, found: dict[Path, Any], dtype: str) -> None:
    averages = adapter_averages(adapted)
    found[Path("run")] = checkpoint(adapted, averages)
    lines = export.export(Path("run"), tmp_path / "out", dtype, averages=True)
    assert sum(str(tmp_path / "out") in line for line in lines) == 1
    policy = export_lora.load_adapted(adapted / files.FOLDER)
    assert policy.adapters is not None
    with torch.no_grad():
        for name, parameter in policy.adapters.named_parameters():
            parameter.copy_(averages[f"ema/{name}"])
    policy.save_pretrained(tmp_path / "expected")
    expected = tensors_of(tmp_path / "expected")
    if dtype:
        expected = {name: tensor.to(torch.bfloat16) for name, tensor in expected.items()}
    assert same(tensors_of(tmp_path / "out"), expected)
    assert not same(expected, tensors_of(adapted))


def test_averages_of_other_adapters_are_refused(adapted: Path, tmp_path: Path, found: dict[Path, Any]) -> None:
    averages = adapter_averages(adapted)
    averages.popitem()
    for given in (averages, {}):
        found[Path("run")] = checkpoint(adapted, given)
        with pytest.raises(OptionsError) as caught:
            export.export(Path("run"), tmp_path / "out", averages=True)
        assert caught.value.problem.code == "export.no_averages"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("dtype", "apart", "fits"),
    [
        (torch.float32, 1e-4, True),
        (torch.float32, 1.05e-4, False),
        (torch.float32, float("nan"), False),
        (torch.bfloat16, 0.25, True),
        (torch.bfloat16, 0.26, False),
    ],
)
def test_merged_matrices_may_differ_by_their_rounding(
    adapted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    apart: float,
    fits: bool,
) -> None:
    class Policy:
        where = "base"

        def save_pretrained(self, directory: Path) -> None:
            (directory / files.FOLDER).mkdir(parents=True)

    policy: Any = Policy()
    policy.dtype, policy.adapters = dtype, SimpleNamespace(named_parameters=dict)
    for module in (export_lora, ema_weights):
        monkeypatch.setattr(module, "load_adapted", lambda folder: policy)
        monkeypatch.setattr(module, "load_policy", lambda folder, dtype: policy if dtype == policy.dtype else None)
        monkeypatch.setattr(module, "logprob_difference", lambda first, second: apart if first is second else 99.0)
    monkeypatch.setattr(ema_weights, "_take_averages", lambda policy, checkpoint: None)
    for number, write in enumerate(
        (
            lambda target: export_lora.export_merged(adapted / files.FOLDER, target),
            lambda target: ema_weights.export_averaged(checkpoint(adapted), target),
        )
    ):
        target = tmp_path / str(number)
        if fits:
            assert write(target)[0].startswith("compared")
        else:
            with pytest.raises(DataError) as caught:
                write(target)
            assert caught.value.problem.code == "export.differs"
        assert target.exists() is fits


def test_an_adapter_is_a_directory_of_its_own_and_is_folded_in_again(
    model: Path, adapted: Path, tmp_path: Path, found: dict[Path, Any]
) -> None:
    found[Path("run")] = checkpoint(adapted)
    lines = export_lora.export_adapter(Path("run"), tmp_path / "out")
    stored = adapted / files.FOLDER
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in stored.iterdir())
    assert same(files.read_tensors(tmp_path / "out"), files.read_tensors(stored))
    record = json.loads(lines[3])
    assert (record["step"], record["directory"], Path(record["base"])) == (7, str(tmp_path / "out"), model)
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert f"{size / 1e6:,.2f} MB, adapters of 7 layers" in lines[1]
    lines = export_lora.export_merged(tmp_path / "out", tmp_path / "merged")
    assert not (tmp_path / "merged" / files.FOLDER).exists()
    merged, expected = tensors_of(tmp_path / "merged"), tensors_of(adapted)
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor)
    assert not same(merged, tensors_of(model))
    assert not export_lora.load_adapted(stored).model.training


def test_adapters_that_are_not_there_or_do_not_read_back_are_refused(
    model: Path, adapted: Path, tmp_path: Path, found: dict[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found[Path("run")] = checkpoint(model)
    with pytest.raises(DataError) as caught:
        export_lora.export_adapter(Path("run"), tmp_path / "out")
    assert caught.value.problem.code == "export.no_adapter"
    found[Path("run")] = checkpoint(adapted)
    read = files.read_tensors

    def value(tensors: dict[str, torch.Tensor]) -> None:
        tensors[sorted(tensors)[0]] += 1.0

    for how in (value, lambda tensors: tensors.popitem(), lambda tensors: tensors.update(other=torch.zeros(1))):

        def damaged(folder: Path, how: Any = how) -> dict[str, torch.Tensor]:
            tensors = read(folder)
            if folder.parent == tmp_path:
                how(tensors)
            return tensors

        monkeypatch.setattr(files, "read_tensors", damaged)
        with pytest.raises(DataError) as caught:
            export_lora.export_adapter(Path("run"), tmp_path / "out")
        assert caught.value.problem.code == "export.differs"
        assert list(tmp_path.iterdir()) == []


def test_a_model_directory_needs_no_export(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "resolve_checkpoint", resolve_checkpoint)
    with pytest.raises(OptionsError) as caught:
        export.export(model, tmp_path / "out")
    assert (caught.value.problem.code, caught.value.problem.do) == ("export.is_model", f"--pretrain {model}")
    with pytest.raises(CheckpointError):
        export.export(tmp_path, tmp_path / "out")
