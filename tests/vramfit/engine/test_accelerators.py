from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from vramfit.engine import accelerators
from vramfit.engine.accelerators import (
    BACKENDS,
    backend_of,
    empty_cache,
    generator_state,
    has_hardware,
    memory_of,
    peak_of,
    prepare_allocator,
    reset_peak,
    set_generator_state,
    synchronize,
)
from vramfit.hardware.devices import TorchBuild

ROOT = Path(__file__).parents[3]
VENDORS = re.compile(
    r"\b(cuda|cudnn|cublas|hip|rocm|xpu|sycl|mps|nvidia|nvml|pynvml|amd|radeon|geforce|apple|metal|intel)\b",
    re.IGNORECASE,
)


GROWS, EXACT = "expandable_segments:True", "pinned_max_round_threshold_mb:1"


def named_vendors(source: str) -> list[tuple[int, str]]:
    """(line, word) for every name, attribute, import and text in code that is a vendor's; prose may name them."""
    tree = ast.parse(source)
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    found = []
    for node in ast.walk(tree):
        words = [
            value
            for name in ("id", "attr", "module", "name", "arg", "value")
            if isinstance(value := getattr(node, name, None), str) and id(node) not in prose
        ]
        # An underscore is a letter to \b: `is_cuda` and `cuda_graphs` are vendors' names too.
        found += [(getattr(node, "lineno", 0), word) for word in words if VENDORS.search(word.replace("_", " "))]
    return found


def test_nothing_but_the_table_names_a_vendor():
    files = [*(ROOT / "vramfit" / "engine").rglob("*.py"), *(ROOT / "vramfit" / "training").rglob("*.py")]
    assert len(files) > 15
    found = {
        str(path.relative_to(ROOT)): named
        for path in files
        if path.name != "accelerators.py" and (named := named_vendors(path.read_text(encoding="utf-8")))
    }
    assert not found, "ask vramfit.engine.accelerators instead"


@pytest.mark.parametrize(
    "line", ["import torch.cuda", "torch.mps.empty_cache()", "x.is_cuda", 'device == "xpu"', "from a import pynvml"]
)
def test_the_search_for_vendors_finds_them(line):
    assert named_vendors(line)
    assert not named_vendors('"""About CUDA."""\nvalues = json.dumps(ship)')


def test_each_kind_of_device_has_its_row(monkeypatch):
    assert [backend_of(device).name for device in ("cuda:1", "xpu:0", "mps", "cpu")] == ["cuda", "xpu", "mps", "cpu"]
    assert backend_of(torch.device("cpu")) is BACKENDS["cpu"]
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert backend_of("cuda:0").name == "rocm" and backend_of("cuda:0").kind == "cuda"


def test_an_unknown_kind_can_nothing_special():
    backend = backend_of("hpu:0")
    assert backend.name == "hpu" and not backend.fused and not backend.pinned and backend.autocast == ()


def test_the_table_agrees_with_torch_where_torch_says():
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    fused = set(_get_fused_kernels_supported_devices())
    assert {backend.kind for backend in BACKENDS.values() if backend.fused} <= fused
    for backend in BACKENDS.values():
        assert torch.amp.is_autocast_available(backend.kind) is bool(backend.autocast)


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), (False, False)), ((8, 0), (True, False)), ((8, 9), (True, True))]
)
def test_units_of_a_card_follow_its_generation(monkeypatch, capability, expected):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    assert (has_hardware("cuda:0", "tf32"), has_hardware("cuda:0", "fp8")) == expected


def test_a_format_nobody_has_units_for_is_no():
    assert has_hardware("cpu", "fp32") and not has_hardware("cpu", "tf32") and not has_hardware("hpu:0", "bf16")


def test_a_cpu_has_the_machines_memory_and_counts_no_tensors():
    memory = memory_of("cpu")
    assert (memory.allocated, memory.reserved, memory.unused) == (0, 0, 0)
    assert 0 < memory.free <= memory.total == psutil.virtual_memory().total
    reset_peak("cpu")
    empty_cache("cpu")
    synchronize("cpu")
    assert peak_of("cpu") == (0, 0)


def test_a_cards_memory_is_read_from_its_own_index(monkeypatch):
    asked = []

    def answer(value):
        return lambda index: asked.append(index) or value

    monkeypatch.setattr("torch.accelerator.memory_allocated", answer(60))
    monkeypatch.setattr("torch.accelerator.memory_reserved", answer(100))
    monkeypatch.setattr("torch.accelerator.get_memory_info", answer((900, 1000)))
    memory = memory_of("cuda:3")
    assert (memory.allocated, memory.reserved, memory.unused, memory.free, memory.total) == (60, 100, 40, 900, 1000)
    assert asked == [3, 3, 3]


def test_a_cpu_has_no_generator_beside_the_processs():
    assert generator_state("cpu") is None
    before = torch.get_rng_state()
    set_generator_state("cpu", torch.zeros(1))
    assert torch.equal(before, torch.get_rng_state())


# ---- the allocator's settings ----


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (TorchBuild(version="2.11.0+cu130", cuda="13.0"), [GROWS]),
        (TorchBuild(version="2.13.0+cu130", cuda="13.0"), [GROWS, EXACT]),
        (TorchBuild(version="2.13.0+rocm7.1", hip="7.1.2"), [GROWS, EXACT]),
        (TorchBuild(version="2.13.0+rocm6.4", hip="6.4"), [EXACT]),
        (TorchBuild(version="2.11.0+rocm7.1", hip="7.1"), []),
        (TorchBuild(version="2.13.0+xpu", xpu="20250300"), [GROWS, EXACT]),
        (TorchBuild(version="2.13.0+cpu"), []),
        (None, []),
    ],
)
def test_the_allocator_is_told_what_its_build_can(monkeypatch, build, settings):
    monkeypatch.setattr(accelerators, "torch_build", lambda: build)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.release", lambda: "6.1.0-generic")
    environment: dict[str, str] = {}
    assert prepare_allocator(environment) is bool(settings)
    assert environment == ({"PYTORCH_ALLOC_CONF": ",".join(settings)} if settings else {})


def test_torch_knows_the_settings():
    """It says nothing of a name it does not know; what it takes for one is named in its library."""
    library = (Path(torch.__file__).parent / "lib" / "libc10.so").read_bytes()
    for setting in (GROWS, EXACT):
        assert setting.partition(":")[0].encode() in library
    torch._C._accelerator_setAllocatorSettings(f"{GROWS},{EXACT}")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_a_users_own_setting_is_left_alone(monkeypatch, name):
    monkeypatch.setattr(accelerators, "torch_build", lambda: TorchBuild(version="2.13.0", cuda="13.0"))
    environment = {name: "max_split_size_mb:512"}
    assert not prepare_allocator(environment)
    assert environment == {name: "max_split_size_mb:512"}


@pytest.mark.parametrize(
    ("system", "release"), [("win32", "11"), ("darwin", "25"), ("linux", "6.6.87.2-microsoft-standard-WSL2")]
)
def test_segments_do_not_grow_on_other_systems(monkeypatch, system, release):
    monkeypatch.setattr(accelerators, "torch_build", lambda: TorchBuild(version="2.13.0", cuda="13.0"))
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.release", lambda: release)
    environment: dict[str, str] = {}
    assert prepare_allocator(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": EXACT}


def test_nothing_of_this_imports_torch():
    code = (
        "import sys; from vramfit.engine.accelerators import backend_of, prepare_allocator;"
        "prepare_allocator(); print(backend_of('xpu:0').name, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["xpu", "False"]
