"""`python -m rft_cli.pretrain` is `rft-train pretrain`."""

from __future__ import annotations

import pytest

from rft_cli import pretrain


def test_the_module_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt_data", "x.txt", "--model-hidden-size", "64", "--print_config"]
    assert pretrain.main(words) == 0
    assert "hidden_size: 64 " in capsys.readouterr().out
    assert pretrain.main(["--model-hidden-size", "x"]) == 2
