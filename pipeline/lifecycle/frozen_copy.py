"""The frozen copy of an experiment's settings folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.pymodules.source_files import COPIED, copied_files, files_with_problems
from pipeline.experiment.settings.settings import Contents
from pipeline.system.disk import Digest, Disk, Writer, json_writer
from pipeline.system.logging import LOGGER


def digest_folder(folder: Path) -> dict[str, str]:
    """Return the digest of every file that is copied, by path below the experiment's folder."""
    return {path.relative_to(folder).as_posix(): Digest.of(path).sha256 for path in copied_files(folder)}


def copy_folder(source: Path, target: Path, sources: dict[str, str], changed: Contents, disk: Disk) -> dict[str, str]:
    """Copy an experiment's folder, with the settings that overrides changed; return the copy's digests.

    ``sources`` are the digests of the files as they were loaded and checked.
    """
    writers = {name: _file_writer(source / name) for name in sources}
    digests = {name: _copy(target, name, writer, disk) for name, writer in writers.items()}
    if digests != sources:
        edited = ", ".join(name for name in sources if digests[name] != sources[name])
        raise InvalidExperiment(
            [Problem(str(source), f"was edited while the experiment started: {edited}", "run again")]
        )
    for name, content in changed.items():
        path = f"settings/{name}.json"
        disk.remove(target / path)
        digests[path] = _copy(target, path, json_writer(content), disk)
    for part in COPIED:
        disk.sync_folders(target / part)
    disk.sync_folder(target)
    return digests


def _copy(target: Path, name: str, writer: Writer, disk: Disk) -> str:
    disk.make_scratch_folder((target / name).parent, target)
    return disk.write(target / name, writer).sha256


def _file_writer(path: Path) -> Writer:
    def write(file: BinaryIO) -> None:
        with path.open("rb") as source:
            shutil.copyfileobj(source, file)

    return write


def differing_files(folder: Path, digests: dict[str, str]) -> list[str]:
    """Return the files below ``folder`` that are not what ``digests`` say, missing and new ones included."""
    # A file that could not even be copied differs from any that was.
    found = {
        path.relative_to(folder).as_posix(): problem or Digest.of(path).sha256
        for path, problem in files_with_problems(folder).items()
    }
    return sorted(name for name in {*found, *digests} if found.get(name) != digests.get(name))


def refuse_edited_copy(results: Path, digests: dict[str, str], *, is_accepted: bool) -> None:
    """Refuse a frozen copy that is not what was copied, or warn where that was accepted."""
    edited = differing_files(results, digests)
    if edited and not is_accepted:
        fix = "restore it, or continue with --accept-edited-copy"
        raise InvalidExperiment([Problem(str(results / name), "the frozen copy was edited", fix) for name in edited])
    for name in edited:
        LOGGER.warning("Continuing with the edited copy of %s, as requested.", name)
