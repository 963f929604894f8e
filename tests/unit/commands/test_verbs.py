"""The helper verbs `new` and `status`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.commands.status import EXIT_CODES
from tests.support.running import run_inside


def call(home: Path, *words: str) -> int:
    return main([*words, "--data-home", str(home)])


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
        (("new", "x", "--template", "digit"), "No template 'digit'; there are digits"),
        (("new", "x", "--from", "tinny"), "Did you mean 'tiny'?"),
        (("new",), "Say which experiment"),
        (("new", "../x"), "The experiment name must be"),
        (("new", "x", "--set", "training.sed=1"), "Did you mean 'seed'?"),
        (("status", "tinny"), "Did you mean 'tiny'?"),
    ],
)
def test_bad_input_is_told(home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    """Bad input ends with exit code 2 and the nearest match; nothing is written."""
    assert call(home, *words) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in (home / "experiment_settings").iterdir()) == ["tiny"]


def test_status_follows_an_experiment(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """New, unfinished and finished are told in words and by exit code."""
    assert call(home, "status", "--exit-code") == EXIT_CODES["new"]
    run_inside(home, "--stop-after-epoch", "1")
    assert call(home, "status", "tiny", "--exit-code") == EXIT_CODES["unfinished"]
    assert "epoch 2, training, step 0" in capsys.readouterr().out
    run_inside(home, "--resume")
    assert call(home, "status", "tiny", "--exit-code") == 0
    assert "best       epoch" in capsys.readouterr().out


def test_status_as_json_is_for_scripts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON holds state, committed place and latest values."""
    run_inside(home, "--stop-after-epoch", "0")
    capsys.readouterr()
    call(home, "status", "--json")
    found = json.loads(capsys.readouterr().out)["tiny"]
    assert found["state"] == "unfinished"
    assert found["committed"] == {"epoch": 1, "stage": "training", "step": 0}
    assert set(found["last"]) == {"loss_a", "loss_b", "error"}


def test_status_leaves_everything_alone(home: Path) -> None:
    """Looking changes no byte and no time stamp."""
    from tests.support.experiments import tree

    run_inside(home, "--stop-after-epoch", "0")
    before = tree(home)
    call(home, "status", "tiny")
    assert tree(home) == before
