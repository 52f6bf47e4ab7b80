"""Commands that a run of a recommender proposes at its end."""

from pathlib import Path

import pytest

from rft_genrec.training import next_steps


def test_the_catalogue_and_the_model_of_the_run_are_in_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_steps, "final_model", lambda directory: directory / "model")
    (tmp_path / "config.yaml").write_text("catalogue: data/my tools # command line\n")
    sft = [command for command, _ in next_steps.after_sft(tmp_path)]
    given = f"--pretrain {tmp_path / 'model'} --catalogue 'data/my tools'"
    assert sft[0] == f"rft-train genrec eval {given}"
    assert sft[-1] == f"rft-train genrec rl {given}"
    assert [command for command, _ in next_steps.after_rl(tmp_path)] == sft[:-1]
