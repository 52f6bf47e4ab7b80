"""Reinforcement fine-tuning from a script: the flags are those of `rft-train rl`.

    python examples/train.py --pretrain MODEL --prompt_data train.jsonl --reward examples/my_reward.py:reward_fn
    torchrun --nproc_per_node=2 examples/train.py --pretrain MODEL --prompt_data train.jsonl

Several ranks also meet without a launcher: export MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, and
start this file once a rank.
"""

from __future__ import annotations

import sys

from rft_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["rl", *sys.argv[1:]]))
