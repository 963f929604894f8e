"""Commands of messages are built whatever has become of the folders around a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.command_lines import kept_options, launched_by, run_line, show_program, verb_line
from pipeline.lifecycle.starts import line_like_last_start
from pipeline.paths import ExperimentPaths


def test_deleted_folder_does_not_hide_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose current folder was deleted still says how to continue."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert run_line("tiny", tmp_path, "--resume").endswith(f"tiny --data-home {tmp_path} --resume")
    assert verb_line("status", "tiny", tmp_path).endswith(f"status tiny --data-home {tmp_path}")


def test_program_of_the_current_folder_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name would be looked for in PATH."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert show_program("torchrun") == str(tmp_path / "torchrun")
    monkeypatch.chdir(tmp_path.parent)
    assert show_program("torchrun") == f"{tmp_path.name}/torchrun"


def test_names_that_a_shell_would_read_are_quoted(tmp_path: Path) -> None:
    """A data home with blanks is one word."""
    assert "--data-home '/a b'" in verb_line("status", "tiny", Path("/a b"))


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["train", "tiny", "--device", "cpu", "--resume"], ["--device", "cpu"]),
        (["run", "tiny", "--", "--device=cpu"], ["--device", "cpu"]),
        (["tiny", "--set", "parameters.device=1"], []),
        ([], []),
    ],
)
def test_options_that_a_start_must_give_anew_are_kept(words: list[str], kept: list[str]) -> None:
    """The device is not part of the frozen settings; modes and overrides are not repeated."""
    assert kept_options(words) == kept


def test_line_repeats_the_device_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the run was launched; flags of a run stand behind the dashes of the verb."""
    monkeypatch.setattr("sys.argv", ["training_pipeline.py", "tiny", "--device", "cpu"])
    assert run_line("tiny", tmp_path, "--resume").endswith("--resume --device cpu")
    assert run_line("tiny", tmp_path).endswith("--device cpu")
    with launched_by("run", ["--nproc", "2"]):
        assert run_line("tiny", tmp_path).endswith(f"run tiny --nproc 2 --data-home {tmp_path} -- --device cpu")
    with launched_by("train", ["--nproc", "2"]):
        assert run_line("tiny", tmp_path).endswith(f"train tiny --nproc 2 --device cpu --data-home {tmp_path}")


@pytest.mark.parametrize(
    ("start", "line"),
    [
        ({"launch": "run --gpus 2,3 --detach", "command": ["x", "tiny"]}, "run tiny --gpus 2,3 --detach {} -- --auto"),
        ({"launch": None, "command": ["x", "tiny", "--device", "cpu"]}, "tiny {} --auto --device cpu"),
        # Of an earlier version, or damaged.
        ({"world_size": 2, "launchers": ["a", "a"]}, "torchrun --nproc-per-node=2 "),
        ("not json", "tiny {} --auto"),
    ],
)
def test_verb_names_a_run_as_it_was_started(start: object, line: str, tmp_path: Path) -> None:
    """The list of starts has the verb, its options and the device, for processes that are not the run."""
    paths = ExperimentPaths(tmp_path, "tiny")
    paths.results.mkdir(parents=True)
    paths.starts_file.write_text(json.dumps(start) if isinstance(start, dict) else str(start))
    assert line.format(f"--data-home {tmp_path}") in line_like_last_start(paths, "--auto")
