"""Real disks that are full, vanish or are not shared, under a real torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.store.compare import first_difference
from tests.runs.test_stopping import step_of
from tests.support.experiments import tree, write_experiment
from tests.support.running import ENTRY, BackgroundRun, environment, run_inside, run_process

RESULTS = Path("experiment_results/tiny")
LARGE_TRUNK = """
    from torch import nn

    module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
    module.register_buffer("ballast", __import__("torch").zeros(200_000))
    settings = {"frozen": False}
"""


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 12 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=False)
    if done.returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="file systems cannot be mounted here")
def test_full_disk_ends_all_processes_and_is_survived(small_disk: Path, tmp_path: Path) -> None:
    """A disk that fills up in mid-run: exit 1 soon, path and sizes named once; with space again, the same bits."""
    files: dict[str, str | None] = {"pymodules/modules/trunk.py": LARGE_TRUNK}
    for home in (small_disk, tmp_path / "reference"):
        write_experiment(home, files=files, training={"checkpoint_every_steps": 1})
    with BackgroundRun(small_disk, nproc=2) as run:
        run.wait_for(lambda: step_of(small_disk)[0] >= 1)
        _fill(small_disk)
        started = time.monotonic()
        assert run.wait() == 1, run.text()
        assert time.monotonic() - started < 30
        said = run.text()
    assert "The last commit is intact" in said
    assert "The next commit needs" in said or "No space left on device" in said
    (small_disk / "ballast").unlink()
    assert run_process(small_disk, "--resume", nproc=2).returncode == 0
    assert run_process(tmp_path / "reference", nproc=2).returncode == 0
    assert first_difference(tmp_path / "reference" / RESULTS / "data", small_disk / RESULTS / "data") is None


def _fill(folder: Path) -> None:
    with (folder / "ballast").open("wb") as file:
        while True:
            try:
                os.write(file.fileno(), bytes(1 << 16))
            except OSError:
                return


@pytest.mark.slow
def test_results_that_vanish_in_mid_run_end_it(tmp_path: Path) -> None:
    """A folder that is moved away under a run is told as such, and is whole where it went."""
    write_experiment(tmp_path, training={"checkpoint_every_steps": 1}, files=EPOCHS)
    with BackgroundRun(tmp_path, nproc=2) as run:
        run.wait_for(lambda: step_of(tmp_path)[0] >= 1)
        (tmp_path / "experiment_results").rename(tmp_path / "gone")
        assert run.wait() == 1, run.text()
        assert "has vanished" in run.text()
    (tmp_path / "gone").rename(tmp_path / "experiment_results")
    assert run_process(tmp_path, "--resume", "--stop-after-epoch", "2", nproc=2).returncode == 0


EPOCHS: dict[str, str | None] = {
    "pymodules/early_stopper.py": """
        from pipeline.components import WeightedLossEarlyStopper

        early_stopper = WeightedLossEarlyStopper(max_epochs=2000)
    """
}


@pytest.mark.slow
def test_processes_without_a_shared_data_home_are_refused(tmp_path: Path) -> None:
    """Two processes that see different folders: exit 2 with both places, and nothing written to either."""
    for name in ("0", "1"):
        write_experiment(tmp_path / name)
    script = tmp_path / "launch.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ENTRY.parent)!r})\n"
        f"os.environ['GORIDEEPSTYLE_DATA_HOME'] = os.path.join({str(tmp_path)!r}, os.environ['RANK'])\n"
        "import training_pipeline\n"
        "code = training_pipeline.main(['tiny'])\n"
        "print('code', code, flush=True)\n"
        "os._exit(code)\n"
    )
    before = tree(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "All processes must see the same data home" in done.stderr
    assert "code 2" in done.stdout
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Points(50, 0)", "Points(51, 0)", "datasets/a.py: the val split has 11 points instead of 10"),
        ("Points(50, 0)", "Points(50, 7)", "datasets/a.py: the content of its points has changed"),
    ],
)
def test_changed_data_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    """Other points than at the start, or other content where that is checked: exit 1, and nothing is changed."""
    write_experiment(tmp_path, data_loading={"fingerprint_points": 8})
    run_inside(tmp_path, "--stop-after-epoch", "1")
    dataset = tmp_path / RESULTS / "pymodules/datasets/a.py"
    before = {name: content for name, (content, _) in tree(tmp_path / RESULTS).items() if name != "run.lock"}
    dataset.write_text(dataset.read_text().replace(old, new))
    done = run_process(tmp_path, "--resume", "--accept-edited-copy")
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    dataset.write_text(dataset.read_text().replace(new, old))
    assert before == {name: content for name, (content, _) in tree(tmp_path / RESULTS).items() if name != "run.lock"}
    assert run_inside(tmp_path, "--resume").is_finished


def test_content_is_compared_only_if_asked_for(tmp_path: Path) -> None:
    """Reading data costs time, so by default only lengths and splits are compared."""
    write_experiment(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "1")
    dataset = tmp_path / RESULTS / "pymodules/datasets/a.py"
    dataset.write_text(dataset.read_text().replace("Points(50, 0)", "Points(50, 7)"))
    assert run_inside(tmp_path, "--resume", "--accept-edited-copy").is_finished
