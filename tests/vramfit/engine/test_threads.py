from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vramfit.engine.threads import let_threads_sleep


def test_threads_sleep_unless_the_user_chose(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' OpenMP does not print its settings so")
def test_torch_reads_it_when_it_is_set_before_the_import():
    code = (
        "import sys; from vramfit.engine.threads import let_threads_sleep; let_threads_sleep();"
        "assert 'torch' not in sys.modules; import torch"
    )
    environment = os.environ | {"OMP_DISPLAY_ENV": "TRUE"}
    environment.pop("OMP_WAIT_POLICY", None)
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in told.stderr
