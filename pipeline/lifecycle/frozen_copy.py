"""The frozen copy of an experiment's settings folder."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.pymodules.assumptions import assumed_files
from pipeline.experiment.pymodules.source_files import COPIED, copied_files, files_with_problems
from pipeline.experiment.settings.settings import Contents, fill_in, parse_settings, read_contents
from pipeline.paths import ExperimentPaths
from pipeline.store.store import read_current_manifest
from pipeline.system.disk import Digest, Disk, Writer, json_writer
from pipeline.system.logging import LOGGER


def digest_folder(folder: Path) -> dict[str, str]:
    """Return the digest of every file that is copied, by path below the experiment's folder."""
    return {path.relative_to(folder).as_posix(): Digest.of(path).sha256 for path in copied_files(folder)}


def copy_folder(source: Path, target: Path, sources: dict[str, str], changed: Contents, disk: Disk) -> dict[str, str]:
    """Copy an experiment's folder, with changed settings and the files it leaves out; return the copy's digests.

    ``sources`` are the digests of the files as they were loaded and checked.
    """
    digests = {name: _write_copy(target, name, partial(_copy_bytes, source / name), disk) for name in sources}
    # Compared with the digests of what was written, not with another look at the source: an author may save a file
    # between the checks and the copy, and then unchecked code would run.
    if digests != sources:
        edited = ", ".join(name for name in sources if digests[name] != sources[name])
        raise InvalidExperiment(
            [Problem(str(source), f"was edited while the experiment started: {edited}", "run again")]
        )
    pymodules = [name.removeprefix("pymodules/") for name in sources if name.startswith("pymodules/")]
    for name, default in assumed_files(pymodules).items():
        path = f"pymodules/{name}"
        digests[path] = _write_copy(target, path, partial(_copy_bytes, default), disk)
    for name, content in changed.items():
        path = f"settings/{name}.json"
        if path in sources:
            # Disk.write creates files and never overwrites one.
            disk.remove(target / path)
        digests[path] = _write_copy(target, path, json_writer(content), disk)
    # Contents are durable already; their names are once for all at the end, deepest folders first.
    for part in COPIED:
        disk.sync_folders(target / part)
    disk.sync_folder(target)
    return digests


def _write_copy(target: Path, name: str, writer: Writer, disk: Disk) -> str:
    disk.make_scratch_folder((target / name).parent, target)
    return disk.write(target / name, writer).sha256


def _copy_bytes(path: Path, file: BinaryIO) -> None:
    with path.open("rb") as source:
        shutil.copyfileobj(source, file)


def differing_files(folder: Path, digests: dict[str, str]) -> list[str]:
    """Return the files below ``folder`` that are not what ``digests`` say, missing and new ones included."""
    # A file that could not even be copied differs from any that was.
    actual = {
        path.relative_to(folder).as_posix(): problem or Digest.of(path).sha256
        for path, problem in files_with_problems(folder).items()
    }
    return sorted(name for name in {*actual, *digests} if actual.get(name) != digests.get(name))


def has_changed_since_start(paths: ExperimentPaths, overrides: tuple[str, ...]) -> bool:
    """Return whether a start would freeze anything else now than the one that wrote these results did."""
    manifest = read_current_manifest(paths)
    if manifest is None or not paths.settings.is_dir():
        return False
    if differing_files(paths.settings, manifest.sources):
        return True
    # The files are the same, but the command line may change other settings.
    frozen = parse_settings(read_contents(paths.results / "settings"))
    wanted = parse_settings(fill_in(read_contents(paths.settings / "settings", overrides), paths.settings))
    # Where no file lists the registers, the pymodules do, and these have not changed.
    listed = {register.name for register in wanted.loss_registers}
    registers = tuple(register for register in frozen.loss_registers if register.name in listed)
    return wanted != replace(frozen, loss_registers=registers)


def refuse_edited_copy(results: Path, digests: dict[str, str], *, is_accepted: bool) -> None:
    """Refuse a frozen copy that is not what was copied, or warn where that was accepted."""
    edited = differing_files(results, digests)
    if edited and not is_accepted:
        fix = "restore it, or continue with --accept-edited-copy"
        raise InvalidExperiment([Problem(str(results / name), "the frozen copy was edited", fix) for name in edited])
    for name in edited:
        LOGGER.warning("Continuing with the edited copy of %s, as requested.", name)
