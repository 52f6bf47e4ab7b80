"""Tasks of the quickstart: the rows that are written, the sizes of their models, and their figures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.tiny_models import quickstart
from rft_models.tiny_models.vision import VisionSizes
from rft_trainer.tasks import addition, calculator_dialogues, drawn_images, guess_number_dialogues


def rows(path: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (path / "data" / f"{name}.jsonl").read_text().splitlines()]


def test_additions_are_split_and_have_a_model_of_characters(
    calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [SimpleNamespace(prompt=f"{number}=", answer=str(number)) for number in range(3)]
    split = SimpleNamespace(train=problems[:2], held_out=problems[2:])
    asked: list[Any] = []
    monkeypatch.setattr(addition, "split", lambda *given: (asked.append(given), split)[1])
    calls.put(quickstart, "build_character_model")
    data = quickstart.write_additions(tmp_path, 7)
    assert asked == [(7, 500)]
    assert rows(tmp_path, "train") == [{"input": f"{n}=", "label": str(n), "output": str(n)} for n in (0, 1)]
    assert rows(tmp_path, "heldout") == [{"input": "2=", "label": "2", "output": "2"}]
    assert calls.taken() == [
        f"build_character_model({tmp_path / 'untrained'!r}, alphabet='0123456789+=', ffn=384, heads=4, hidden=128, "
        "layers=2, seed=7)"
    ]
    assert (data.num_train, data.num_held_out, data.figures) == (2, 1, {"num_characters": 12})


def test_images_are_drawn_with_a_question_each(calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawings(seed: int, name: str, count: int) -> list[Any]:
        calls.made.append(f"drawings({seed}, {name}, {count})")
        return [SimpleNamespace(question=f"{name}?", answer=str(number), png=bytes([number])) for number in range(2)]

    monkeypatch.setattr(drawn_images, "drawings", drawings)
    monkeypatch.setattr(drawn_images, "chance", lambda pairs: pairs)
    calls.put(quickstart, "require_image_packages build_vision_model", build_character_tokenizer="tokenizer")
    data = quickstart.write_images(tmp_path, 7)
    sizes = VisionSizes(
        hidden=128,
        kv_heads=4,
        ffn=384,
        max_positions=64,
        vision_hidden=128,
        vision_ffn=256,
        patch_size=8,
        image_size=drawn_images.SIZE,
    )
    assert calls.taken() == [
        "require_image_packages()",
        "drawings(7, train, 4000)",
        "drawings(7, heldout, 400)",
        f"build_character_tokenizer({drawn_images.ALPHABET!r})",
        f"build_vision_model({tmp_path / 'untrained'!r}, 'tokenizer', seed=7, sizes={sizes!r})",
    ]
    assert rows(tmp_path, "train")[1] == {
        "input": "<image>train?\n",
        "image": "train/00001.png",
        "label": "1",
        "output": "1",
    }
    # a held-out row has no output to imitate
    assert rows(tmp_path, "heldout")[0] == {"input": "<image>heldout?\n", "image": "heldout/00000.png", "label": "0"}
    for name in ("train", "heldout"):
        assert (tmp_path / "data" / name / "00001.png").read_bytes() == b"\x01"
    assert (data.num_train, data.num_held_out) == (4000, 400)
    assert data.figures == {"size": drawn_images.SIZE, "chance": [("heldout?", "0"), ("heldout?", "1")]}
    # the same files may be written again
    quickstart.write_images(tmp_path, 7)


@pytest.mark.parametrize(
    ("write", "module", "make", "figures"),
    [
        (
            quickstart.write_calculator,
            calculator_dialogues,
            "calculator",
            {
                "share_calls": calculator_dialogues.SHARE_CALLS,
                "share_malformed": calculator_dialogues.SHARE_MALFORMED,
            },
        ),
        (
            quickstart.write_guess_number,
            guess_number_dialogues,
            "guess_number",
            {
                "turns": guess_number_dialogues.GAME.turns,
                "width": guess_number_dialogues.GAME.width,
                "blind_chance": float(guess_number_dialogues.blind_chance()),
                "heedful_chance": float(guess_number_dialogues.heedful_chance()),
                "share_heedful": guess_number_dialogues.SHARE_HEEDFUL,
            },
        ),
    ],
)
def test_dialogues_have_a_model_whose_tokens_are_learned_from_them(
    calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, module: Any, make: str, figures: Any
) -> None:
    demonstrations = [{"input": [{"role": "user", "content": str(n)}], "output": "o"} for n in range(2_001)]
    made = SimpleNamespace(
        train=[{"input": "a"}, {"input": "b"}], held_out=[{"input": "c"}], demonstrations=demonstrations
    )
    monkeypatch.setattr(module, make, lambda seed: made if seed == 7 else None)
    learned: list[Any] = []
    tokenizer = calls.double("tokenizer")
    calls.put(quickstart, "build_decoder")
    calls.replace(quickstart, build_bpe_tokenizer=lambda *given: (learned.append(given), tokenizer)[1])
    data = write(tmp_path, 7)
    assert learned == [(quickstart.dialogue_texts(demonstrations[:2_000]), 320)]  # type: ignore[arg-type]
    assert tokenizer.chat_template == quickstart.DIALOGUE_TEMPLATE
    assert calls.taken() == [
        f"build_decoder({tmp_path / 'untrained'!r}, tokenizer, ffn=384, heads=4, hidden=128, kv_heads=4, layers=2, "
        "max_positions=256, seed=7)"
    ]
    assert [len(rows(tmp_path, name)) for name in ("train", "heldout", "dialogues")] == [2, 1, 2_001]
    assert rows(tmp_path, "train") == made.train
    assert rows(tmp_path, "dialogues")[3] == demonstrations[3]
    assert (data.num_train, data.num_held_out, data.figures) == (2, 1, figures)


def test_a_dialogue_is_written_as_its_template_writes_it() -> None:
    row: Any = {"input": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], "output": "c"}
    assert quickstart.dialogue_texts([row]) == ["user: a\ntool: b\nassistant: c"]
