"""The library stands without the panel's packages and without those only some machines have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"gradio", "plotly", "sqlite_utils", "fastapi", "bitsandbytes", "pynvml"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch.nn.functional as F
for name in ("linear_cross_entropy",):
    if hasattr(F, name):
        delattr(F, name)
import vramfit
names = [module.name for module in pkgutil.walk_packages(vramfit.__path__, "vramfit.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
model = __import__("torch").nn.Linear(2, 1)
step = vramfit.wrap(model, __import__("torch").optim.SGD(model.parameters(), lr=0.1),
                    loss=lambda model, x: (model(x).sum(), len(x)))
print(len(names) > 40, step(__import__("torch").ones(3, 2)).tokens)
print([name for name in ("jobs", "ui", "transformers", "peft") if name in sys.modules])
"""


def test_every_module_imports_and_a_step_is_done_without_them() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True 3", "[]"], done.stderr
