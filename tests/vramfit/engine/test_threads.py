from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vramfit.engine.threads import let_threads_sleep


def test_threads_sleep_unless_the_user_chose(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' OpenMP does not print its settings so")
def test_torch_reads_it_when_it_is_set_before_the_import():
    code = (
        "import sys; from vramfit.engine.threads import let_threads_sleep; let_threads_sleep();"
        "assert 'torch' not in sys.modules; import torch"
    )
    environment = os.environ | {"OMP_DISPLAY_ENV": "TRUE"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        environment.pop(name, None)
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in told.stderr
