"""Reinforcement fine-tuning of a vision-language model from a script: the flags are those of `rft-train rl`.

    python examples/train_vl.py --pretrain MODEL --mixed_mm_data --packing_samples --prompt_data train.jsonl

Rows hold their images in the column `image`; `--images_key NAME` names another.
"""

from __future__ import annotations

import sys

from rft_cli.main import main


def with_images(argv: list[str]) -> list[str]:
    """The words, with `--images_key image` where neither they nor a file of settings say which column it is."""
    names = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return argv if names & {"images_key", "config"} else [*argv, "--images_key", "image"]


if __name__ == "__main__":
    sys.exit(main(["rl", *with_images(sys.argv[1:])]))
