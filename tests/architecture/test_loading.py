"""There is one way to read tensors and arrays, and it is the safe one."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOADERS = {
    ROOT / "pipeline/serialization/torch_files.py": {("torch", "load")},
    ROOT / "pipeline/serialization/npz_files.py": {("np", "load")},
}
READERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("pickle", "load"), ("pickle", "loads")}
READERS |= {("safetensors.torch", name) for name in ("load", "load_file", "safe_open")}


def readers_in(path: Path) -> set[tuple[str, str]]:
    """Return which functions that read pickles a file mentions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    used = {
        (node.value.id, node.attr) for node in nodes if isinstance(node, ast.Attribute) and hasattr(node.value, "id")
    }
    imported = {
        (str(node.module), alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return (used | imported) & READERS


def test_only_the_safe_loaders_read_tensors_and_arrays() -> None:
    """No other file of the package calls a reader that could run code or fill the memory."""
    others = [*(ROOT / "pipeline").rglob("*.py"), ROOT / "training_pipeline.py"]
    assert {path: readers_in(path) for path in others if readers_in(path)} == LOADERS
