#!/usr/bin/env bash
# The tests that need root and Debian packages: two machines of network namespaces, and a SLURM of one machine.
#
#   ci/system.sh            install what they need, then run them
#   ci/system.sh --no-apt   run what this machine has the programs for; the rest is deselected and counted
#
# The tests start their own munged, slurmctld and slurmd from a configuration of their own, and end them.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = "--no-apt" ]; then
    shift
else
    [ "$(id -u)" -eq 0 ] || { echo "run as root: packages, network namespaces and SLURM's daemons need it" >&2; exit 2; }
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge iproute2
fi
export OMP_NUM_THREADS=1
status=0
uv run pytest -m system tests/system "$@" || status=$?
if [ "$status" -eq 5 ]; then
    echo "no test was selected: nothing was tested" >&2
    exit 1
fi
exit "$status"
