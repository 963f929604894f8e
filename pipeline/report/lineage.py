"""Lineage: which experiments and files the weights of an experiment came from, read from its frozen copy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from pipeline.errors import UsageError
from pipeline.paths import ExperimentPaths
from pipeline.system.files import read_regular

_MAX_EXPERIMENTS = 50


class Link(TypedDict):
    """Where one module took its weights from: a pool of an experiment, or a file if ``experiment`` is empty."""

    of: str
    module: str
    experiment: str
    pool: str
    name: str


def trace_lineage(paths: ExperimentPaths) -> list[Link]:
    """Return where modules took their weights from, for the experiment and for those it builds on."""
    found = []
    waiting = [paths.name]
    # Experiments may name each other in a ring.
    seen = {paths.name}
    while waiting and len(seen) <= _MAX_EXPERIMENTS:
        links = list(_find_links(paths, waiting.pop(0)))
        found += links
        new = [link["experiment"] for link in links if link["experiment"] not in {"", *seen}]
        waiting += dict.fromkeys(new)
        seen |= set(new)
    return found


def _find_links(paths: ExperimentPaths, name: str) -> Iterator[Link]:
    try:
        folder = paths.other(name).results / "pymodules" / "modules"
    except UsageError:
        # A name that is not one of an experiment: it leads nowhere.
        return
    for file in sorted(folder.glob("*.py")):
        settings = _read_module_settings(file)
        source = settings.get("load_weights_from_exp")
        if isinstance(source, dict):
            experiment, pool, module = (str(source.get(f"{key}_name", "")) for key in ("exp", "ckp_pool", "module"))
            yield {"of": name, "module": file.stem, "experiment": experiment, "pool": pool, "name": module}
        source = settings.get("load_weights_from_ckp")
        if isinstance(source, dict):
            checkpoint = str(source.get("ckp_name", ""))
            yield {"of": name, "module": file.stem, "experiment": "", "pool": "", "name": checkpoint}


def _read_module_settings(file: Path) -> dict[object, object]:
    """Return a module's settings where they are written out as a literal.

    The file is parsed and not imported: a page runs no code of an experiment. Computed settings are left out.
    """
    values = []
    try:
        for node in ast.parse(read_regular(file)).body:
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            is_settings = any(isinstance(target, ast.Name) and target.id == "settings" for target in targets)
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_settings and node.value is not None:
                values.append(node.value)
        # The last assignment is the one in force when the module has been imported.
        settings = ast.literal_eval(values[-1]) if values else {}
    except (OSError, SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
