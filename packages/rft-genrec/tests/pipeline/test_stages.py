"""Command lines of stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_core.errors import OptionsError
from rft_genrec.pipeline.stages import filled, final_model, stages_of
from rft_genrec.settings.run import GenrecRunSettings, PipelineSettings, StageOptionSettings


def settings(stages: str, catalogue: str = "", **options: str) -> GenrecRunSettings:
    pipeline = PipelineSettings(stages=stages, catalogue=catalogue, save_path="unused")
    return GenrecRunSettings(pipeline=pipeline, options=StageOptionSettings(**options))


def test_a_stage_gets_the_paths_that_stages_share(tmp_path: Path) -> None:
    (tmp_path / "rl" / "checkpoints" / "step_000012" / "model").mkdir(parents=True)
    stages = {stage.name: stage for stage in stages_of(settings("data,embed,sid,sft,rl,eval", sft_options="--l2 0.1"))}
    assert list(stages) == ["data", "embed", "sid", "sft", "rl", "eval"]
    assert filled(stages["data"], tmp_path) == ["genrec", "data", "--save_path", f"{tmp_path}/catalogue"]
    there = ["--catalogue", f"{tmp_path}/catalogue"]
    assert filled(stages["sft"], tmp_path) == ["genrec", "sft", *there, "--save_path", f"{tmp_path}/sft", "--l2", "0.1"]
    (tmp_path / "catalogue").mkdir()
    (tmp_path / "catalogue" / "tools.emb-tfidf.npy").touch()
    assert filled(stages["sid"], tmp_path)[4:] == ["--embeddings", f"{tmp_path}/catalogue/tools.emb-tfidf.npy"]
    model = filled(stages["rl"], tmp_path)[5]
    assert model == str(final_model(tmp_path / "sft")) == f"{tmp_path}/sft/checkpoints/step_*/model"
    assert filled(stages["eval"], tmp_path)[5] == f"{tmp_path}/rl/checkpoints/step_000012/model"


def test_a_catalogue_that_is_there_is_copied_without_what_stages_write(tmp_path: Path) -> None:
    copied, *_ = stages_of(settings("sid,sft", catalogue=str(tmp_path)))
    assert copied.outside == (tmp_path,)
    assert "catalogue/*.index.json" not in copied.writes
    copied, *_ = stages_of(settings("sft", catalogue=str(tmp_path)))
    assert "catalogue/*.index.json" in copied.writes


def test_files_of_options_are_inputs_and_an_open_quote_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "reviews.json"
    file.write_text("{}")
    [stage, *_] = stages_of(settings("data,sft", data_options=f"--source table --input={file}"))
    assert stage.outside == (file,)
    with pytest.raises(OptionsError, match="cannot be divided"):
        stages_of(settings("data", data_options="--input 'a"))
