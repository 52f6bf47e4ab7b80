"""Directories of the family are known where they are met, and by transformers' automatic classes once it is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_models.new_decoders.build import build_new_decoder
from rft_models.own_decoder.registration import register_for
from rft_models.policy.load import load_policy
from rft_models.settings import DecoderSettings
from rft_models.tiny_models.text import build_character_tokenizer

PROGRAM = """
import sys
from transformers import AutoModelForCausalLM
from rft_models.own_decoder.registration import register_own_decoder
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    assert "rft_decoder" in str(error)
register_own_decoder()
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""


def test_transformers_loads_a_directory_once_the_family_is_registered(tmp_path: Path) -> None:
    build_character_tokenizer("abc").save_pretrained(str(tmp_path / "tokenizer"))
    chosen = DecoderSettings(hidden_size=16, num_heads=2, use_glu=False)
    directory = build_new_decoder(tmp_path / "model", chosen, tmp_path / "tokenizer", seed=0)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "RftDecoderForCausalLM", done.stderr


def test_a_file_that_cannot_be_read_is_left_to_whoever_reads_it(tmp_path: Path) -> None:
    register_for(tmp_path)
    (tmp_path / "config.json").write_text("[")
    register_for(tmp_path)
    with pytest.raises(DataError, match=r"config\.json"):
        load_policy(tmp_path)
