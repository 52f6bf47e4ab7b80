#!/usr/bin/env bash
# The tests that need a GPU, from source, with the torch that is installed (2.11 or later); nothing is downloaded.
#
#   ci/gpu.sh             one GPU and several, whatever is there
#   ci/gpu.sh gpu         tests that need one GPU
#   ci/gpu.sh multigpu    tests that need two
#
# Ends with 0 only if tests ran and passed: no GPU, no torch, no test selected are failures.
set -euo pipefail
cd "$(dirname "$0")/.."

marker="${1:-gpu or multigpu}"
python="${PYTHON:-python3}"
export PYTHONPATH="$(printf '%s:' packages/*/src kernels/src | sed 's/:$//')${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$python" - <<'CHECK'
import sys

try:
    import torch
except ImportError:
    sys.exit("torch is not installed: a GPU test needs torch 2.11 or later")
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if version < (2, 11):
    sys.exit(f"torch {torch.__version__} is older than 2.11")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device: nothing would be tested")
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, python {sys.version.split()[0]}: {', '.join(names)}")
CHECK

status=0
"$python" -m pytest -m "$marker" -p no:cacheprovider packages kernels tests || status=$?
if [ "$status" -eq 5 ]; then
    echo "no test with the marker \"$marker\" was selected: nothing was tested" >&2
    exit 1
fi
exit "$status"
