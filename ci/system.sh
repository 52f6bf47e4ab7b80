#!/usr/bin/env bash
# The tests that need root and Debian packages: two machines of network namespaces, a SLURM of one machine, and the
# sandbox of the reward `code`, which needs bubblewrap and not root.
#
#   ci/system.sh            install what they need, then run them
#   ci/system.sh --no-apt   run what this machine has the programs for; the rest is deselected and counted
#   ci/system.sh --sandbox  the sandbox alone, in under a minute: installs bubblewrap where it may, and where there is
#                           none says which tests were not run, and ends well
#
# The tests start their own munged, slurmctld and slurmd from a configuration of their own, and end them.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

install() {
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

sandbox_alone() {
    if ! command -v bwrap >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        install bubblewrap >/dev/null || echo "bubblewrap could not be installed" >&2
    fi
    local reason
    if ! reason=$(bwrap --unshare-user --unshare-pid --unshare-net --ro-bind / / true 2>&1); then
        echo "not run: tests/system/test_sandbox.py, because no sandbox can be made here: ${reason##*: }"
        return 0
    fi
    uv run pytest -m system tests/system/test_sandbox.py "$@"
}

if [ "${1:-}" = "--sandbox" ]; then
    shift
    sandbox_alone "$@"
    exit
fi
if [ "${1:-}" = "--no-apt" ]; then
    shift
else
    [ "$(id -u)" -eq 0 ] || { echo "run as root: packages, network namespaces and SLURM's daemons need it" >&2; exit 2; }
    install slurm-wlm munge iproute2 bubblewrap chromium
fi
status=0
uv run pytest -m system tests/system "$@" || status=$?
if [ "$status" -eq 5 ]; then
    echo "no test was selected: nothing was tested" >&2
    exit 1
fi
exit "$status"
