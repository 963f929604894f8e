"""Power cuts at the level of blocks: a real file system, whose disk lost what it was not asked to keep."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from pipeline.errors import PipelineError
from pipeline.store.compare import first_difference
from pipeline.store.manifest import read_state
from tests.support.experiments import write_experiment
from tests.support.logged_disk import MARK, LoggedDisk, mounted
from tests.support.running import environment, run_inside

RESULTS = Path("experiment_results/tiny")
# Smallest sizes that the file systems can be made with, and some room.
SIZES = {"ext4": 48 << 20, "xfs": 320 << 20, "btrfs": 160 << 20}
NUM_CUTS = int(os.environ.get("POWER_CUTS", "10"))
SEED = int(os.environ.get("POWER_SEED", "1"))


def why_not(kind: str) -> str:
    """Return why a file system cannot be cut off from power here, nothing if it can."""
    if os.geteuid() or not os.access("/dev/fuse", os.W_OK):
        return "needs root, /dev/fuse and loop devices"
    return "" if shutil.which(f"mkfs.{kind}") else f"needs mkfs.{kind}"


# Runs to the end and marks, in the log of the disk, each commit that a run has been told is safe.
PROGRAM = """
import os, sys
from pathlib import Path
from pipeline.system.disk import Disk
from tests.support.running import run_inside

class MarkingDisk(Disk):
    def replace_file(self, path, writer, staging):
        digest = super().replace_file(path, writer, staging)
        if path.name == "state.json":
            import json
            os.pwrite(mark, b"%09d" % json.loads(path.read_text())["generation"], 0)
        return digest

mark = os.open(sys.argv[2], os.O_WRONLY)
if "no content" in sys.argv:
    os.fsync = lambda descriptor: None
run_inside(Path(sys.argv[1]), disk=MarkingDisk())
"""


def run_on(disk: LoggedDisk, *words: str) -> None:
    with disk.running() as home:
        write_experiment(home)
        os.sync()
        line = [sys.executable, "-c", PROGRAM, str(home), str(disk.mark_file), *words]
        done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr


def survive_cuts(disk: LoggedDisk, reference: Path, num_cuts: int) -> list[str]:
    """Cut the power at random instants of the run, resume each time, and return what was lost or differs."""
    events, draw, problems = disk.events(), Random(SEED), list[str]()
    first_mark = next(index for index, event in enumerate(events) if event.kind == MARK)
    for number in range(num_cuts):
        # A third of the cuts come before the first commit.
        span = (0, first_mark) if number % 3 == 0 else (first_mark, len(events))
        instant = draw.randrange(*span)
        image = disk.image.with_name("cut")
        promised = disk.cut(events, instant, draw, image)
        with mounted(image, disk.mounted) as home:
            problem = survive_cut(home, reference, promised)
        if problem:
            problems.append(f"cut at event {instant} of {len(events)}, commit {promised} promised: {problem}")
    return problems


def survive_cut(home: Path, reference: Path, promised: int) -> str | None:
    if not (home / "experiment_settings/tiny/settings/training.json").exists() and not promised:
        # The settings were written by the test, not by the run, and may not have reached the disk yet.
        return None
    state = read_state(home / RESULTS / "state.json")
    if promised and (state is None or state.generation < promised):
        return f"state.json names commit {state.generation if state else None}"
    try:
        run_inside(home, "--auto")
    except PipelineError as error:
        return str(error)
    return first_difference(reference / RESULTS / "data", home / RESULTS / "data")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_power_cuts_lose_no_commit(tmp_path: Path, kind: str) -> None:
    """Whatever instant the power fails at, promised commits are there, and the run ends with the same bits."""
    if reason := why_not(kind):
        pytest.skip(reason)
    reference = tmp_path / "reference"
    write_experiment(reference)
    run_inside(reference)
    disk = LoggedDisk(tmp_path / "disk", kind, SIZES[kind])
    run_on(disk)
    assert survive_cuts(disk, reference, NUM_CUTS) == []


@pytest.mark.slow
def test_power_cuts_find_a_program_that_never_syncs(tmp_path: Path) -> None:
    """Without a single fsync, cuts lose commits that were promised: the test above can fail."""
    if reason := why_not("ext4"):
        pytest.skip(reason)
    reference = tmp_path / "reference"
    write_experiment(reference)
    run_inside(reference)
    disk = LoggedDisk(tmp_path / "disk", "ext4", SIZES["ext4"])
    run_on(disk, "no content")
    assert survive_cuts(disk, reference, 6) != []
