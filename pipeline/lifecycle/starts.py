"""The list of starts: what each one ran on, and whether their results can be bit-exact together."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.paths import ExperimentPaths
from pipeline.progress import Progress
from pipeline.system.disk import Disk, bytes_writer
from pipeline.system.files import read_regular
from pipeline.system.formatting import shown_by_rank, shown_fact

# Has no influence on the bits of a run whose gradients are added exactly.
_GROUP = ("world_size", "backend")
# What bits may depend on.
_COMPARED = (
    *_GROUP,
    "devices",
    "cpus",
    "cpu_capabilities",
    "cpu_variables",
    "threads",
    "deterministic",
    "torch",
    "numpy",
    "python",
    "mkl",
    "onednn",
    "blas",
    "cuda",
    "cudnn",
)


def read_starts(paths: ExperimentPaths) -> list[dict[str, Any]]:
    """Return what each start so far has said of itself."""
    try:
        content = read_regular(paths.starts_file)
    except FileNotFoundError:
        return []
    except OSError as error:
        # The file is rewritten with each start, which must not lose one that cannot be read.
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


@dataclass(frozen=True)
class Conditions:
    """How a start compares with those before it.

    ``changed`` and ``harmless`` list what is not as at the last start: what bits may depend on, and what they do not.
    ``doubt`` says why results are not bit-exact with those of an uninterrupted run, and is empty if they are.
    """

    changed: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    doubt: str = ""


@dataclass(frozen=True)
class _Stretch:
    """A part of the results: the start that computed it, and from where on."""

    number: int
    place: Progress
    facts: dict[str, Any]


def compare_starts(starts: list[dict[str, Any]], *, is_exact: bool) -> Conditions:
    """Compare the last of the starts with those before it."""
    ignored = _GROUP if is_exact else ()
    earlier = [start for start in starts[:-1] if "unreadable" not in start]
    since_last = differences(earlier[-1], starts[-1]) if earlier else {}
    return Conditions(
        changed=tuple(words for name, words in since_last.items() if name not in ignored),
        harmless=tuple(words for name, words in since_last.items() if name in ignored),
        doubt=_find_doubt(starts, ignored),
    )


def _find_doubt(starts: list[dict[str, Any]], ignored: tuple[str, ...]) -> str:
    stretches = _find_stretches(starts)
    first: dict[str, Any] = {}
    for stretch in stretches:
        # An older version recorded less: then the first start that has a fact is the one to compare with.
        first = {**stretch.facts, **first}
        when = "now" if stretch.number == len(starts) else f"start {stretch.number}"
        changes = [words for name, words in differences(first, stretch.facts).items() if name not in ignored]
        unequal = _find_unequal_ranks(stretch.facts)
        if changes or unequal:
            what = f"{', '.join(changes)} (first start → {when})" if changes else f"{', '.join(unequal)} ({when})"
            return f"not bit-exact: {what}; bits may differ from {stretch.place.describe_next()} on"
    unknown = next((number for number, start in enumerate(starts, 1) if _read_place(start) is None), None)
    if unknown is not None:
        return f"not known to be bit-exact: line {unknown} of starts.jsonl is damaged"
    if stretches and stretches[0].place != Progress():
        return f"not known to be bit-exact: no start before {stretches[0].place.describe_next()} is recorded"
    return ""


def _find_stretches(starts: list[dict[str, Any]]) -> list[_Stretch]:
    """Return the starts of whose work something is left.

    A start replaces what earlier ones computed behind the place it continues from: that was lost with a kill, or with
    a damaged commit.
    """
    stretches: list[_Stretch] = []
    for number, start in enumerate(starts, 1):
        place = _read_place(start)
        if place is not None:
            stretches = [stretch for stretch in stretches if stretch.place.order < place.order]
            stretches.append(_Stretch(number, place, _select_facts(start)))
    return stretches


def _read_place(start: dict[str, Any]) -> Progress | None:
    try:
        return Progress.from_json(start["from"])
    except (KeyError, TypeError, ValueError):
        return None


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Return what changed between two starts, by name, in words; only what both have recorded is compared."""
    old = _select_facts(before)
    new = _select_facts(now)
    return {
        name: f"{name} {_describe(old[name])} → {_describe(new[name])}"
        for name in _COMPARED
        if name in old and name in new and not _is_same(old[name], new[name])
    }


def _select_facts(start: dict[str, Any]) -> dict[str, Any]:
    """Return what a start has recorded of what bits depend on."""
    facts = {name: start[name] for name in _COMPARED if name in start}
    if facts.get("cpus") == facts.get("devices"):
        # The run is on CPUs: one of the two is enough.
        facts.pop("cpus", None)
    if _list_kinds(facts.get("devices")) in ({platform.machine()}, {platform.processor()}):
        # Older versions recorded the architecture alone, so the model is unknown.
        facts.pop("devices")
    return facts


def _is_same(before: Any, now: Any) -> bool:
    """Compare rank by rank; with another number of ranks, compare which values there are."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return before == now
    return _list_kinds(before) == _list_kinds(now)


def _list_kinds(value: Any) -> set[str]:
    return {shown_fact(entry) for entry in (value if isinstance(value, list) else [value])}


def _find_unequal_ranks(facts: dict[str, Any]) -> list[str]:
    """Return what was not the same on every rank: each computes its own update, and only one is committed."""
    return [f"{name} {_describe(value)}" for name, value in facts.items() if len(_list_kinds(value)) > 1]


def _describe(value: Any) -> str:
    return shown_by_rank(value) if isinstance(value, list) else shown_fact(value)
