"""The list of starts: what each one has said of itself, for ever."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.paths import ExperimentPaths
from pipeline.runtime.durable import Disk, bytes_writer
from pipeline.runtime.regular_files import read_regular

_COMPARED = ("world_size", "backend", "devices", "torch", "numpy", "python", "threads")


def read_starts(paths: ExperimentPaths) -> list[dict[str, Any]]:
    """Return what each start so far has said of itself."""
    try:
        content = read_regular(paths.starts_file)
    except FileNotFoundError:
        return []
    except OSError as error:
        # It is written anew with each start: one that cannot be read must not be lost by that.
        raise PipelineError(f"{error.filename} cannot be read: {error.strerror}.\n  fix: move it away.") from error
    return [_parsed(line) for line in content.decode(errors="replace").splitlines()]


def run_id(paths: ExperimentPaths) -> str:
    """Return what names an experiment from its first start to its reset."""
    return hashlib.sha256(json.dumps(read_starts(paths)[:1], sort_keys=True).encode()).hexdigest()[:16]


def _parsed(line: str) -> dict[str, Any]:
    """Keep a line that cannot be read for those who can make something of it."""
    try:
        start = json.loads(line)
    except (ValueError, RecursionError):
        return {"unreadable": line}
    return start if isinstance(start, dict) else {"unreadable": line}


def record_start(paths: ExperimentPaths, start: dict[str, Any], disk: Disk, staging: Path) -> None:
    """Add one line to the list of starts, atomically."""
    lines = [json.dumps(known, sort_keys=True) + "\n" for known in [*read_starts(paths), start]]
    disk.replace_file(paths.starts_file, bytes_writer("".join(lines).encode()), staging / paths.starts_file.name)


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Return what a resumed run has otherwise than the one before it, by what it is, in words."""
    return {
        name: f"{name} {_shown(before[name])} → {_shown(now[name])}"
        for name in _COMPARED
        if name in before and _shown(before[name]) != _shown(now[name])
    }


def _shown(value: Any) -> str:
    """Return a value in words; of the devices of all processes only which kinds there are."""
    return " and ".join(sorted(set(value))) if isinstance(value, list) else str(value)
