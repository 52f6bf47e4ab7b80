"""What every packed model does with its parts: parameters by name, checks, modes and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_models.backbone import packed_model as module
from rft_models.backbone.packed_model import PackedModel, TrainedRows

Calls = list[tuple[Any, ...]]


class Decoder(nn.Module):
    """A decoder of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])


class Inner(Decoder):
    """A model whose first matrix is tied to another name, and which keeps what it is asked to write."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(2, 3, bias=False)
        self.tied.weight = self.layers[0].weight  # type: ignore[assignment]
        self.decoder = [Decoder()]
        self.written: list[tuple[str, dict[str, Tensor]]] = []

    def get_decoder(self) -> Decoder:
        """The part that ends with the last norm, no module of its own here."""
        return self.decoder[0]

    def save_pretrained(self, directory: str, state_dict: dict[str, Tensor] | None = None) -> None:
        """Note what is written."""
        assert state_dict is not None
        self.written.append((directory, state_dict))


class Model(PackedModel):
    """The smallest packed model."""

    def saved_name(self, name: str) -> str:
        """Files have a prefix."""
        return f"model.{name}"

    def snapshot(self, copy: Callable[[str, Tensor], Tensor]) -> Callable[[Path], None]:
        """Copy all parameters, then write the copies."""
        tensors = {name: copy(name, parameter) for name, parameter in self.named_parameters()}
        return lambda directory: self.write(directory, tensors)


@pytest.fixture
def tower(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vision tower that models of this test have."""
    found = SimpleNamespace(runs_always=False)
    monkeypatch.setattr(module, "vision_tower_of", lambda model: found)
    return found


@pytest.fixture
def no_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of this test have no vision tower."""
    monkeypatch.setattr(module, "vision_tower_of", lambda model: None)


def make(**options: Any) -> Model:
    return Model(Inner(), options.pop("tokenizer", None), packed=options.pop("packed", True), **options)


def test_the_backbone_is_that_of_the_decoder_and_computed_as_asked(tower: Any) -> None:
    kernel = SimpleNamespace()
    for packed in (True, False):
        model = make(packed=packed, kernel=kernel)
        assert (model.packed, model.backbone.packed) == (packed, packed)
        assert model.backbone.kernel is kernel
        assert model.backbone.tower is model.tower is tower
        assert model.backbone.decoder is model.model.get_decoder()
        assert [tuple(layer.weight.shape) for layer in model.layers] == [(3, 2), (2, 3)]  # type: ignore[union-attr]
        assert model.accepts("input") == ("input" in model.backbone._accepts)
    assert tower.runs_always is False
    model.gather_always()
    assert tower.runs_always is True


@pytest.mark.usefixtures("no_tower")
def test_without_images_the_model_is_its_own_decoder() -> None:
    model = make()
    assert model.backbone.decoder is model.model
    assert model.backbone.tower is model.tower is None
    model.gather_always()


@pytest.mark.parametrize("has_tower", [True, False])
def test_states_are_checked_and_those_with_images_where_there_is_a_tower(
    has_tower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Calls = []
    tower = SimpleNamespace() if has_tower else None
    monkeypatch.setattr(module, "vision_tower_of", lambda model: tower)
    for name in ("check_states", "check_image_states"):
        monkeypatch.setattr(module, name, lambda *words, name=name, **known: calls.append((name, words, known)))
    model = make(where="there")
    model.verify()
    known = {"device": torch.device("cpu"), "dtype": torch.float32, "where": "there"}
    expected: Calls = [("check_states", (model.backbone.decoder, model.backbone), known)]
    if has_tower:
        expected.append(("check_image_states", (model.model, model.backbone, tower), known))
    assert calls == expected


NAMES = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]


@pytest.mark.usefixtures("no_tower")
def test_parameters_have_the_names_of_files_and_tied_ones_appear_once() -> None:
    model = make()
    assert [name for name, _ in model.named_parameters()] == [f"model.{name}" for name in NAMES]
    assert model.num_parameters == 6 + 3 + 6 + 2
    assert [name for name, _ in model.base_parameters()] == NAMES
    assert [name for name, _ in model.base_parameters(remove_duplicate=False)] == [*NAMES, "tied.weight"]
    assert [name for name, _ in model.merged_parameters()] == NAMES
    given = [("a", torch.zeros(1))]
    assert list(model.merged_parameters(given)) == given


@pytest.mark.usefixtures("no_tower")
def test_the_optimizer_gets_what_has_a_gradient_and_the_trained_rows_of_a_matrix() -> None:
    model = make()
    model.model.layers[0].bias.requires_grad_(False)
    rows = nn.Parameter(torch.zeros(1, 2))
    weight = model.model.layers[0].weight
    hook = weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.zero_())
    model.trained_rows["model.layers.0.weight"] = TrainedRows("rows", 1, rows, hook)
    model.trained_rows["model.layers.0.bias"] = TrainedRows("never", 1, rows, hook)
    found = list(model.trainable_parameters())
    assert [name for name, _ in found] == ["rows", "model.layers.1.weight", "model.layers.1.bias"]
    assert found[0][1] is rows
    del model.trained_rows["model.layers.0.bias"]
    assert model.release_trained_rows() == {"model.layers.0.weight": 1}
    assert next(iter(model.trainable_parameters()))[1] is weight, "the whole matrix"
    weight.sum().backward()
    assert weight.grad is not None
    assert bool((weight.grad == 1).all()), "which keeps its gradient"
    assert model.release_trained_rows() == {}


class Folded:
    """Adapters that name the parameters of the base and fold themselves in."""

    def base_parameters(self, *, remove_duplicate: bool) -> Iterator[tuple[str, bool]]:
        """One, which says how it was asked."""
        yield "base", remove_duplicate

    def merged(self, named: Any) -> Iterator[tuple[str, str]]:
        """All that were given, under another name."""
        for name, _ in named:
            yield f"merged.{name}", "folded"


@pytest.mark.usefixtures("no_tower")
def test_adapters_give_the_parameters_of_the_base_and_fold_themselves_in() -> None:
    model = make()
    model.adapters = Folded()  # type: ignore[assignment]
    bases: Any = [list(model.base_parameters()), list(model.base_parameters(remove_duplicate=False))]
    assert bases == [[("base", True)], [("base", False)]]
    assert list(model.merged_parameters([("a", torch.zeros(1))])) == [("merged.a", "folded")]
    assert [name for name, _ in model.merged_parameters()] == [f"merged.{name}" for name in NAMES]


@pytest.mark.parametrize("has_tokenizer", [True, False])
@pytest.mark.parametrize("has_tower", [True, False])
def test_a_directory_gets_weights_tokenizer_and_image_processor(
    has_tokenizer: bool, has_tower: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Calls = []
    monkeypatch.setattr(module, "vision_tower_of", lambda model: SimpleNamespace() if has_tower else None)
    monkeypatch.setattr(module, "keep_processor_files", lambda *words: calls.append(("processor", *words)))
    tokenizer = SimpleNamespace(save_pretrained=lambda directory: calls.append(("tokenizer", directory)))
    model = make(tokenizer=tokenizer if has_tokenizer else None, where="there")
    directory = tmp_path / "a" / "b"
    for _ in range(2):  # a directory that is there already is written again
        calls.clear()
        model.save_pretrained(str(directory))
        assert directory.is_dir()
        expected: Calls = [("tokenizer", directory)] if has_tokenizer else []
        assert calls == expected + ([("processor", "there", directory)] if has_tower else [])
    path, tensors = model.model.written[-1]
    assert path == str(directory)
    for (name, tensor), (wanted, parameter) in zip(tensors.items(), model.named_parameters(), strict=True):
        assert name == wanted
        assert tensor is parameter


@pytest.mark.usefixtures("no_tower")
def test_modes_are_those_of_the_model() -> None:
    model = make()
    assert model.eval() is model
    assert not model.model.training
    assert model.train() is model
    assert model.model.training
    assert not model.train(False).model.training
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
