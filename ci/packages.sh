#!/usr/bin/env bash
# Each package alone: its own environment with nothing but what it declares, and its own tests in it.
#
#   ci/packages.sh                        every package, then the wheels
#   ci/packages.sh rft-algos rft-engine   these
#   ci/packages.sh wheels                 build all wheels; compute a GRPO loss with rft-core, rft-algos and torch alone
set -euo pipefail
cd "$(dirname "$0")/.."

folder_of() {
    if [ "$1" = rft-kernels ]; then echo kernels; else echo "packages/$1"; fi
}

alone() {
    local name="$1" folder
    folder="$(folder_of "$name")"
    [ -d "$folder" ] || { echo "there is no package $name" >&2; exit 2; }
    echo "== $name alone"
    export UV_PROJECT_ENVIRONMENT=".venv-alone/$name"
    uv sync --frozen --package "$name" --no-default-groups --group dev
    uv run --no-sync --package "$name" pytest "$folder/tests"
    unset UV_PROJECT_ENVIRONMENT
}

wheels() {
    echo "== wheels"
    rm -rf .venv-alone/wheels
    uv build --all-packages --wheel --out-dir .venv-alone/wheels/dist
    uv venv .venv-alone/wheels/venv
    uv pip install --python .venv-alone/wheels/venv .venv-alone/wheels/dist/rft_core-*.whl .venv-alone/wheels/dist/rft_algos-*.whl
    (cd .venv-alone/wheels && venv/bin/python - <<'LOSS'
import importlib.util

import torch
from rft_algos.algorithms.published import Grpo
from rft_algos.objectives import RolloutBatch, compute_advantages, policy_loss

absent = ("numpy", "transformers", "rft_trainer", "rft_cli", "pydantic")
assert not [name for name in absent if importlib.util.find_spec(name)], "more is installed than torch asks for"
algorithm = Grpo(kl_place="none")
sequences, mask = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
logprobs = torch.tensor([-1.0, -2.0, -1.5, -0.5], requires_grad=True)
old_logprobs = logprobs.detach()
batch = RolloutBatch(
    rewards_N=torch.tensor([1.0, 0.0]),
    group_ids_N=torch.tensor([0, 0]),
    loss_mask_T=mask,
    segment_ids_T=sequences,
    old_logprobs_T=old_logprobs,
    behaviour_logprobs_T=old_logprobs,
)
output = policy_loss(
    algorithm,
    logprobs_T=logprobs,
    old_logprobs_T=old_logprobs,
    reference_logprobs_T=None,
    entropy_T=None,
    advantages_T=compute_advantages(algorithm, batch).advantages_T,
    loss_mask_T=mask,
    segment_ids_T=sequences,
    num_loss_tokens=4,
    num_sequences=2,
)
output.loss.backward()
assert logprobs.grad[0] < 0 < logprobs.grad[2], "the right answer must become likelier"
print(f"GRPO loss {output.loss.item():+.4f} with rft-core, rft-algos and torch {torch.__version__} alone")
LOSS
    )
}

if [ "$#" -eq 0 ]; then
    set -- $(for folder in packages/*; do basename "$folder"; done) rft-kernels wheels
fi
for name in "$@"; do
    if [ "$name" = wheels ]; then wheels; else alone "$name"; fi
done
