"""Lineage: which experiments and files the weights of an experiment came from, read from its frozen copy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import UsageError
from pipeline.paths import ExperimentPaths
from pipeline.system.files import read_regular

_MAX_EXPERIMENTS = 50


def lineage(paths: ExperimentPaths) -> list[dict[str, str]]:
    """Return where modules took their weights from, for the experiment and for those it builds on."""
    found = []
    waiting = [paths.name]
    seen = {paths.name}
    while waiting and len(seen) <= _MAX_EXPERIMENTS:
        name = waiting.pop(0)
        links = list(_links(paths, name))
        found += links
        new = [link["experiment"] for link in links if link["experiment"] not in {"", *seen}]
        waiting += dict.fromkeys(new)
        seen |= set(new)
    return found


def _links(paths: ExperimentPaths, name: str) -> Iterator[dict[str, str]]:
    try:
        folder = paths.other(name).results / "pymodules" / "modules"
    except UsageError:
        return
    for file in sorted(folder.glob("*.py")):
        settings = _settings(file)
        source = settings.get("load_weights_from_exp")
        if isinstance(source, dict):
            words = {key: str(source.get(f"{key}_name", "")) for key in ("exp", "ckp_pool", "module")}
            yield _link(name, file, words["exp"], words["ckp_pool"], words["module"])
        source = settings.get("load_weights_from_ckp")
        if isinstance(source, dict):
            yield _link(name, file, "", "", str(source.get("ckp_name", "")))


def _link(of: str, file: Path, experiment: str, pool: str, name: str) -> dict[str, str]:
    return {"of": of, "module": file.stem, "experiment": experiment, "pool": pool, "name": name}


def _settings(file: Path) -> dict[str, Any]:
    """Return a module's settings where they are written out; what is computed is left unsaid."""
    try:
        tree = ast.parse(read_regular(file))
        values = [value for node in tree.body if (value := _assigned(node)) is not None]
        settings = ast.literal_eval(values[-1]) if values else {}
    except (OSError, SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _assigned(node: ast.stmt) -> ast.expr | None:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    is_settings = any(isinstance(target, ast.Name) and target.id == "settings" for target in targets)
    return node.value if is_settings and isinstance(node, ast.Assign | ast.AnnAssign) else None
