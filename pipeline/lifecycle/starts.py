"""The list of starts: what each one ran on, and whether their results can be bit-exact together.

``provenance.py`` describes the start of this process. It is a file of its own because it needs torch, and verbs such as
``status`` and ``logs`` read the list without importing torch.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from pipeline.arguments import set_flags
from pipeline.command_lines import kept_options, run_line
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
Facts = Mapping[str, object]

# One line of starts.jsonl. Every key may be missing, because earlier versions recorded less. A fact of which every rank
# has the same value is written once, else as a list by rank. The functional form is needed: "from" is a keyword.
Start = TypedDict(
    "Start",
    {
        "id": str,
        "command": list[str],
        # The verb that started the processes, with its options; None under a torchrun of the user's own, or alone.
        "launch": str | None,
        # What --set, and options that are short for it, changed.
        "overrides": list[str],
        "time": str,
        "host": str,
        "pid": int,
        "from": dict[str, object],
        "world_size": int,
        "backend": str,
        "devices": list[str],
        "cpus": list[str],
        "cpu_capabilities": list[str],
        "cpu_variables": str | list[str],
        # An int, or a list of them; readers that need a number look for themselves which one it is.
        "threads": Any,
        "deterministic": bool,
        "torch": str | list[str],
        "numpy": str | list[str],
        "mkl": str | list[str | None] | None,
        "onednn": str | list[str | None] | None,
        "blas": str | list[str | None] | None,
        "cuda": str | list[str | None] | None,
        "cudnn": str | list[str | None] | None,
        "launchers": list[str | None],
        "pipeline": str,
        "python": str,
        "git_commit": str | None,
        "git_dirty": bool | None,
        # The whole line, if it is not a JSON object; no other key is there then.
        "unreadable": str,
    },
    total=False,
)


def read_starts(paths: ExperimentPaths) -> list[Start]:
    """Return the record of each start so far, oldest first."""
    try:
        content = read_regular(paths.starts_file)
    except FileNotFoundError:
        return []
    except OSError as error:
        # The file is rewritten with each start, which must not lose one that cannot be read.
        raise PipelineError(f"{error.filename} cannot be read: {error.strerror}.\n  fix: move it away.") from error
    return [_parse_line(line) for line in content.decode(errors="replace").splitlines()]


def _parse_line(line: str) -> Start:
    """Return a record; a damaged line is kept, because the next start writes the whole list again."""
    try:
        start: Start = json.loads(line)
    except (ValueError, RecursionError):
        return {"unreadable": line}
    return start if isinstance(start, dict) else {"unreadable": line}


def run_id(paths: ExperimentPaths) -> str:
    """Return an identifier that an experiment keeps from its first start to its reset."""
    # Nothing else is both written once and unlike that of the same experiment before a reset.
    return hashlib.sha256(json.dumps(read_starts(paths)[:1], sort_keys=True).encode()).hexdigest()[:16]


def line_like_last_start(paths: ExperimentPaths, *flags: str) -> str:
    """Return the line that runs an experiment as its latest start did, for a process that is not the run itself."""
    starts = [start for start in read_starts(paths) if "unreadable" not in start]
    last = starts[-1] if starts else Start()
    # One launcher for each rank's machine; a line for several machines cannot be made from here.
    is_on_one_machine = len(set(last.get("launchers", []))) <= 1
    kept = kept_options([str(word) for word in last.get("command", [])])
    return run_line(
        paths.name,
        paths.home,
        *flags,
        *kept,
        num_processes=last.get("world_size") if is_on_one_machine else None,
        launch=last.get("launch"),
    )


def record_start(paths: ExperimentPaths, start: Start, disk: Disk, staging: Path) -> None:
    """Add one line to the list of starts, atomically."""
    # Replaced as a whole, not appended to: a kill or a power cut within an append would leave half a line.
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
    facts: Facts


def compare_starts(starts: Sequence[Start], *, is_exact: bool) -> Conditions:
    """Compare the last of the starts with those before it."""
    ignored = _GROUP if is_exact else ()
    earlier = [start for start in starts[:-1] if "unreadable" not in start]
    since_last = differences(earlier[-1], starts[-1]) if earlier else {}
    return Conditions(
        changed=tuple(words for name, words in since_last.items() if name not in ignored),
        harmless=tuple(words for name, words in since_last.items() if name in ignored),
        doubt=_find_doubt(starts, ignored),
    )


def _find_doubt(starts: Sequence[Start], ignored: tuple[str, ...]) -> str:
    stretches = _find_stretches(starts)
    first: Facts = {}
    for stretch in stretches:
        # An older version recorded less: then the first start that has a fact is the one to compare with.
        first = {**stretch.facts, **first}
        when = "now" if stretch.number == len(starts) else f"start {stretch.number}"
        changes = [words for name, words in differences(first, stretch.facts).items() if name not in ignored]
        # Each rank computes its own update and one of them is committed, so ranks that differ put bits in doubt too.
        unequal = [f"{name} {_describe(fact)}" for name, fact in stretch.facts.items() if len(_list_kinds(fact)) > 1]
        if changes or unequal:
            reason = f"{', '.join(changes)} (first start → {when})" if changes else f"{', '.join(unequal)} ({when})"
            return f"not bit-exact: {reason}; bits may differ from {stretch.place.describe_next()} on"
    damaged = next((number for number, start in enumerate(starts, 1) if _read_place(start) is None), None)
    if damaged is not None:
        return f"not known to be bit-exact: line {damaged} of starts.jsonl is damaged"
    if stretches and stretches[0].place != Progress():
        return f"not known to be bit-exact: no start before {stretches[0].place.describe_next()} is recorded"
    return ""


def _find_stretches(starts: Sequence[Start]) -> list[_Stretch]:
    """Return the starts of whose work something is left."""
    stretches: list[_Stretch] = []
    for number, start in enumerate(starts, 1):
        place = _read_place(start)
        if place is not None:
            # What earlier starts computed behind this place was lost, with a kill or with a damaged commit.
            stretches = [stretch for stretch in stretches if stretch.place.order < place.order]
            stretches.append(_Stretch(number, place, _select_facts(start)))
    return stretches


def _read_place(start: Start) -> Progress | None:
    """Return where a start continued from; None if its line does not say."""
    try:
        return Progress.from_json(start["from"])
    except (KeyError, TypeError, ValueError):
        return None


def differences(before: Facts, now: Facts) -> dict[str, str]:
    """Return what changed between two starts, by name, in words; only what both have recorded is compared."""
    old = _select_facts(before)
    new = _select_facts(now)
    changes = {}
    for name in _COMPARED:
        if name not in old or name not in new:
            continue
        old_fact = old[name]
        new_fact = new[name]
        if isinstance(old_fact, list) and isinstance(new_fact, list) and len(old_fact) == len(new_fact):
            is_same = old_fact == new_fact
        else:
            # With another number of ranks, ranks do not correspond: compare which values there are.
            is_same = _list_kinds(old_fact) == _list_kinds(new_fact)
        if not is_same:
            changes[name] = f"{name} {_describe(old_fact)} → {_describe(new_fact)}"
    return changes


def _select_facts(start: Facts) -> dict[str, object]:
    """Return what a start has recorded of what bits depend on."""
    facts = {name: start[name] for name in _COMPARED if name in start}
    if facts.get("cpus") == facts.get("devices"):
        # The run is on CPUs: one of the two is enough.
        facts.pop("cpus", None)
    if _list_kinds(facts.get("devices")) in ({platform.machine()}, {platform.processor()}):
        # Older versions recorded the architecture alone, so the model is unknown.
        facts.pop("devices")
    return facts


def _list_kinds(fact: object) -> set[str]:
    """Return the different values that ranks have recorded."""
    return {shown_fact(value) for value in (fact if isinstance(fact, list) else [fact])}


def _describe(fact: object) -> str:
    return shown_by_rank(fact) if isinstance(fact, list) else shown_fact(fact)


def reset_flags(paths: ExperimentPaths) -> list[str]:
    """Return ``--reset`` with what the first start changed by ``--set``: the settings folder does not have it."""
    starts = read_starts(paths)
    overrides = starts[0].get("overrides", []) if starts else []
    return ["--reset", *set_flags(map(str, overrides))]
