"""Imports go down only."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.running import run_inside

ROOT = Path(__file__).parents[2]
LAYERS = [
    {"errors", "verbs", "requirements"},
    {"paths", "progress"},
    {"command_lines"},
    {"arguments"},
    {"system"},
    {"distributed"},
    {"serialization"},
    {"store"},
    {"components"},
    {"experiment"},
    {"checkpoint"},
    {"training", "lifecycle"},
    {"monitoring", "tracking"},
    {"report"},
    {"session"},
    {"loop"},
    {"run"},
    {"worker"},
    {"evaluation", "launch", "tracing"},
    {"commands", "__main__", "training_pipeline"},
]
# Within a layer of single files, these know each other and nothing else does.
ALLOWED = {("__main__", "commands"), ("training_pipeline", "__main__")}
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def part_of(path: Path) -> str:
    inner = path.relative_to(ROOT)
    return inner.parts[1].removesuffix(".py") if inner.parts[0] == "pipeline" else inner.stem


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pipeline."):
            found.add(node.module.split(".")[1])
        if isinstance(node, ast.ImportFrom) and node.module == "pipeline":
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("pipeline.")}
    return found


FILES = [
    path for path in [*(ROOT / "pipeline").rglob("*.py"), ROOT / "training_pipeline.py"] if path.name != "__init__.py"
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    """A file imports only from its own part and from parts below it."""
    own = part_of(path)
    for other in imported_parts(path) - {own}:
        assert LEVEL[other] < LEVEL[own] or (own, other) in ALLOWED, f"{own} must not import {other}"


def imported_modules(path: Path) -> set[str]:
    """Return the modules of the package that a file imports when it is imported itself."""
    found = set()
    # Imports inside functions run later, and cannot close a cycle.
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("pipeline.")}
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "pipeline":
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_modules_import_each_other() -> None:
    """Not even inside one part: graphlib refuses a cycle, and names it."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    graph = {name: imported_modules(path) & set(modules) - {name} for name, path in modules.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)


def test_every_part_has_its_place() -> None:
    """A new part must be given a layer."""
    assert {part_of(path) for path in FILES} == set(LEVEL)


WITHOUT_TORCH = {
    "new": ["other"],
    "status": ["tiny"],
    "launch": ["tiny", "--nproc", "1", "--print"],
    "slurm": ["tiny", "--time", "10", "--print"],
    "logs": ["tiny"],
    "stop": ["tiny"],
    "compare": ["tiny"],
    "report": ["tiny"],
    "clean": ["tiny"],
}


@pytest.mark.parametrize("verb", WITHOUT_TORCH)
def test_verbs_without_torch_stay_so(verb: str, home: Path) -> None:
    """These verbs answer at once because they never import torch."""
    words = [verb, *WITHOUT_TORCH[verb]]
    run_inside(home, "--stop-after-epoch", "0")
    code = (
        "import sys; from pipeline.__main__ import main; "
        f"main({[*words, '--data-home', str(home)]!r}); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_experiments_import_components_only() -> None:
    """The example needs nothing of us but the author's vocabulary."""
    for path in (ROOT / "example_settings").rglob("*.py"):
        assert imported_parts(path) <= {"components"}
