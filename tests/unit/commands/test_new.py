"""The verb `new`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.running import run_inside
from tests.support.verbs import call


def test_new_writes_an_experiment_that_trains(tmp_path: Path) -> None:
    """What `new` writes runs as it is."""
    assert call(tmp_path, "new", "mine", "--set", "training.seed=4") == 0
    assert json.loads((tmp_path / "experiment_settings/mine/settings/training.json").read_text())["seed"] == 4
    assert run_inside(tmp_path, "--stop-after-epoch", "0", name="mine").epoch == 1


def test_new_refuses_what_exists(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An experiment that exists is never overwritten."""
    assert call(home, "new", "tiny") == 3
    assert "exists already" in capsys.readouterr().err
    assert call(home, "new", "tiny", "--exist-ok") == 0


def test_new_from_takes_what_ran(home: Path) -> None:
    """A variant starts from the frozen copy, overrides included."""
    run_inside(home, "--set", "training.seed=9", "--stop-after-epoch", "0")
    assert call(home, "new", "variant", "--from", "tiny") == 0
    assert json.loads((home / "experiment_settings/variant/settings/training.json").read_text())["seed"] == 9


@pytest.mark.parametrize("kind", ["pipe", "device", "outside"])
def test_new_from_copies_files_only(home: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """A pipe, a device or a link to elsewhere is refused at once, and nothing is written."""
    path = home / "experiment_settings/tiny/pymodules/utils/odd.bin"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero" if kind == "device" else "/etc")
    assert call(home, "new", "variant", "--from", "tiny") == 2
    assert "odd.bin: must" in capsys.readouterr().err
    assert [path.name for path in (home / "experiment_settings").iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("new", "x", "--template", "digit"), "No template 'digit'; there are contrastive, diffusion, digits"),
        (("new", "x", "--from", "tinny"), "Did you mean 'tiny'?"),
        (("new",), "Say which experiment"),
        (("new", "../x"), "The experiment name must be"),
        (("new", "x", "--set", "training.sed=1"), "Did you mean 'seed'?"),
    ],
)
def test_bad_input_is_told(home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    """Bad input ends with exit code 2 and the nearest match; nothing is written."""
    assert call(home, *words) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in (home / "experiment_settings").iterdir()) == ["tiny"]
