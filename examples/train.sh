#!/usr/bin/env bash
# One training run, started once a rank by srun, or alone:
#
#   srun -N2 --gres=gpu:8 --ntasks-per-node=8 bash examples/train.sh --pretrain MODEL --prompt_data train.jsonl
#   bash examples/train.sh --pretrain MODEL --prompt_data train.jsonl
#
# Every task of srun finds its rank, its machine and the first host in what SLURM sets; nothing has to be exported.
# MASTER_ADDR and MASTER_PORT may be, and then hold. PYTHON names another interpreter.
set -euo pipefail
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/train.py" "$@"
