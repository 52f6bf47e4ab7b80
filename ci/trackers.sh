#!/usr/bin/env bash
# Weights & Biases, TensorBoard, Trackio and MLflow themselves, offline: an environment of its own with their extras.
set -euo pipefail
cd "$(dirname "$0")/.."
export UV_PROJECT_ENVIRONMENT="${RFT_TRACKERS_ENV:-.venv-trackers}"
uv run --extra wandb --extra tensorboard --extra trackio --extra mlflow \
    pytest -q packages/rft-trainer/tests/sinks "$@"
