"""The architecture page names every file once; imports point one way; names and entry points stay as promised."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("vramfit", "jobs", "ui")
FORBIDDEN_NAMES = {"utils", "helpers", "common", "manager", "util", "helper", "misc"}


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def documented_files() -> list[str]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^- `([^`]+)`", text, flags=re.MULTILINE)


def test_every_file_has_exactly_one_line() -> None:
    expected = sorted(
        path.as_posix()
        for path in tracked_files()
        if path.parts[0] in (*PACKAGES, "bench") or path.parts == ("app.py",)
        if path.suffix != ".pyi" and not (path.name == "__init__.py" and len(path.parts) > 2)
    )
    assert sorted(documented_files()) == expected


def test_no_file_hides_behind_an_empty_name() -> None:
    hiding = [path for path in tracked_files() if FORBIDDEN_NAMES & {path.stem, *path.parent.parts}]
    assert hiding == []


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_imports_point_one_way() -> None:
    """ui -> jobs -> vramfit. The command `train` records where the panel looks: the one stated exception."""
    forbidden = {"vramfit": {"jobs", "ui", "gradio", "plotly"}, "jobs": {"ui", "gradio", "plotly"}}
    exceptions = {Path("vramfit/commands/train.py"): {"jobs"}}
    wrong = {
        path.as_posix(): names
        for path in tracked_files()
        if path.suffix == ".py" and path.parts[0] in forbidden
        if (names := imports_of(ROOT / path) & forbidden[path.parts[0]] - exceptions.get(path, set()))
    }
    assert wrong == {}


def test_all_sql_is_in_the_store() -> None:
    statement = re.compile(
        r"\b(SELECT\b.+\bFROM|INSERT\s+(OR\s+\w+\s+)?INTO|UPDATE\s+\w+\s+SET|DELETE\s+FROM)\b", re.I | re.S
    )
    sql = [
        path.as_posix()
        for path in tracked_files()
        if path.suffix == ".py" and path.parts[0] in PACKAGES
        if path != Path("jobs/schema.py") and path.parent != Path("jobs/store")
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and statement.search(node.value)
    ]
    assert sql == []


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("ui.panel, jobs.supervisor", ("torch", "transformers", "peft")),
        ("vramfit, vramfit.__main__, vramfit.planning.planner", ("torch", "transformers", "gradio", "plotly")),
    ],
)
def test_the_panel_and_the_planner_import_nothing_heavy(modules: str, absent: tuple[str, ...]) -> None:
    code = f"import {modules}, sys; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_ci_runs_the_readme_test_command() -> None:
    commands = re.findall(r"^python3 -m venv .+$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
