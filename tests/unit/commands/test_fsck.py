"""`fsck`: every digest verified, and for each damage what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import RunLock
from tests.support.experiments import tree
from tests.support.running import run_inside


@pytest.fixture
def paths(begun: Path) -> ExperimentPaths:
    """An experiment that may be damaged."""
    return ExperimentPaths(begun, "tiny")


def fsck(paths: ExperimentPaths) -> int:
    before = tree(paths.results)
    code = main(["fsck", "tiny", "--data-home", str(paths.home)])
    assert tree(paths.results) == before
    return code


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_intact_results_are_told_so(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing wrong: exit 0 and one line per commit."""
    assert fsck(paths) == 0
    said = capsys.readouterr().out
    assert "commit 6 (current), epoch 2, training, step 0: can be resumed from" in said
    assert "commit 5, epoch 1, evaluation: can be resumed from" in said
    assert "every digest holds" in said


def test_damaged_weights_are_told_with_the_commit_to_go_on_from(
    paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that the two latest commits share: the one before them is named, and the next command."""
    for file in (paths.generations / "5/module_ckps/last/trunk.pt", paths.data / "module_ckps/last/trunk.pt"):
        flip(file)
    assert fsck(paths) == 1
    said = capsys.readouterr().out
    assert "commit 6 (current), epoch 2, training, step 0: DAMAGED" in said
    assert "trunk.pt has another content than was committed (" in said
    assert "module_ckps/last/trunk.pt" in said
    assert "; commits 6, 5)" in said
    assert "damaged weight pools: epoch_1, last; intact: " in said
    assert "--resume    (continues from commit 4, epoch 1, training, step 4)" in said


def test_copy_that_is_intact_is_named(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Where data/ has copies instead of links, a damaged file can be restored from there."""
    damaged = paths.generations / "1/module_ckps/frzn/stem.pt"
    damaged.unlink()
    assert fsck(paths) == 1
    said = capsys.readouterr().out
    assert f"{damaged} is missing" in said
    assert f"restore: cp {paths.data / 'module_ckps/frzn/stem.pt'} {damaged}" in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("state.json", "state.json is missing or damaged"),
        ("generations/6/manifest.json", "manifest.json is damaged"),
        ("settings/training.json", "was edited since the experiment began"),
        ("data/loss_reg_data/val/error/epoch_data.npz", "was replaced; the committed file is intact"),
        ("data/module_ckps/init/trunk.pt", "was replaced"),
    ],
)
def test_every_file_is_looked_at(
    paths: ExperimentPaths, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    """Whatever is changed is found and named, and the next command is given."""
    flip(paths.results / name)
    assert fsck(paths) == 1
    found = capsys.readouterr().out
    assert said in found
    assert "next: " in found


def test_strays_are_named(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """What belongs to no commit is shown; nothing is damaged, and the next start completes it."""
    (paths.temp_data / "claim_x").mkdir()
    (paths.generations / "3").mkdir(exist_ok=True)
    (paths.generations / "3/old.pt").touch()
    assert fsck(paths) == 0
    said = capsys.readouterr().out
    assert "old.pt belongs to no commit" in said
    assert "claim_x belongs to no commit" in said
    assert "the next start completes this" in said
    run_inside(paths.home, "--resume", "--stop-after-epoch", "1")
    assert fsck(paths) == 0


def test_nothing_intact_is_told(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """With no commit to go on from, only a backup helps."""
    for file in paths.generations.glob("*/manifest.json"):
        flip(file)
    assert fsck(paths) == 1
    assert "nothing here can be resumed" in capsys.readouterr().out


def test_living_run_is_left_alone(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are being written cannot be judged."""
    lock = RunLock(paths)
    lock.acquire()
    assert main(["fsck", "tiny", "--data-home", str(paths.home)]) == 3
    assert "is in use" in capsys.readouterr().err
    lock.release()
