#!/usr/bin/env bash
# Tier 2: every test that this machine can run, the long matrices included, then each package alone.
# RFT_DATA_DIR names the folder of the public data sets; without it the tests that read them are left out and counted.
set -euo pipefail
cd "$(dirname "$0")/.."
uv run pytest -n "${RFT_TEST_PROCESSES:-2}" --dist loadgroup -m "full or not full"
ci/packages.sh
