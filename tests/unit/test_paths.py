"""Names that are safe, where the data home is, and which experiments a data home holds."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import UsageError
from pipeline.paths import (
    DATA_HOME_VARIABLE,
    ExperimentPaths,
    check_name,
    data_home,
    pool_file,
    results_names,
    settings_names,
)

UNSAFE = {
    "empty": "",
    "dot": ".",
    "dot dot": "..",
    "slash": "/",
    "climbing": "a/../../b",
    "empty segment": "a//b",
    "absolute": "/a",
    "trailing slash": "a/",
    "hidden": ".hidden",
    "hidden inside a group": "a/.git",
    "too long": "x" * 300,
    "nul": "a\0b",
    "newline": "a\n",
    "newline inside": "a\nb",
    "option": "-rf",
    "cyrillic a": "\u0430bc",
    "full-width digit": "run\uff11",
    "fraction slash": "a\u2044b",
    "right-to-left mark": "a\u200fb",
    "space": "my run",
    "backslash": "a\\b",
    "plus of our own trash": "a+b",
    "home": "~",
    "variable": "$HOME",
}


@pytest.mark.parametrize("name", UNSAFE.values(), ids=UNSAFE.keys())
def test_unsafe_name_is_refused(name: str) -> None:
    """A name that could leave its folder or fool a reader never becomes part of a path."""
    with pytest.raises(UsageError, match="experiment name must"):
        ExperimentPaths(Path("/home"), name)


@pytest.mark.parametrize("name", ["a", "a/b", "group/sub/run-1", "v1.2_final", "0", "a..b", "x" * 200])
def test_safe_name_is_taken_as_it_is(name: str) -> None:
    """Letters, digits, '.', '_' and '-', grouped by '/', are a name."""
    assert check_name(name) == name


@given(st.text(max_size=30))
def test_accepted_name_never_leaves_its_folder(name: str) -> None:
    """Whatever text is given, it is refused or its results lie inside the data home."""
    try:
        paths = ExperimentPaths(Path("/home"), name)
    except UsageError:
        return
    top = Path("/home/experiment_results")
    assert paths.results.resolve().is_relative_to(top)
    assert paths.results.resolve() != top


def test_refused_name_is_shown_as_it_was_given() -> None:
    """The message quotes the name with invisible characters made visible."""
    with pytest.raises(UsageError, match=r"'a\\x00b'"):
        check_name("a\0b")


@patch.dict(os.environ, {DATA_HOME_VARIABLE: "/variable"})
def test_option_wins_over_variable_and_folder() -> None:
    """--data-home is the data home even if the environment names another."""
    assert data_home("/option") == Path("/option")


@patch.dict(os.environ, {DATA_HOME_VARIABLE: "/variable"})
def test_variable_wins_over_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the option the environment variable names the data home."""
    monkeypatch.chdir(tmp_path)
    assert data_home(None) == Path("/variable")


@pytest.mark.parametrize("variable", [{}, {DATA_HOME_VARIABLE: ""}], ids=["unset", "empty"])
def test_current_folder_is_the_last_resort(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: dict[str, str]
) -> None:
    """Without option and variable the data home is where the command was given."""
    monkeypatch.chdir(tmp_path)
    with patch.dict(os.environ, variable):
        assert data_home(None) == tmp_path


def test_relative_data_home_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A later change of folder cannot move the data home."""
    monkeypatch.chdir(tmp_path)
    assert data_home("sub") == tmp_path / "sub"


def test_every_folder_of_an_experiment_lies_where_the_contract_says() -> None:
    """The four folders are named in the contract and grouped alike."""
    paths = ExperimentPaths(Path("/home"), "group/run")
    assert paths.settings == Path("/home/experiment_settings/group/run")
    assert paths.results == Path("/home/experiment_results/group/run")
    assert paths.logs == Path("/home/experiment_logs/group/run")
    assert paths.error_files == Path("/home/experiment_torchelastic_error_files/group/run")
    assert pool_file(paths.data, "best", "trunk") == paths.results / "data/module_ckps/best/trunk.pt"


def test_trash_of_a_reset_can_never_be_an_experiment() -> None:
    """What a reset renames away has a name that no experiment may have."""
    trash = ExperimentPaths(Path("/home"), "group/run").trash
    with pytest.raises(UsageError):
        check_name(trash.relative_to("/home/experiment_results").as_posix())


def test_different_experiments_have_different_trash() -> None:
    """Two resets at once cannot meet in one folder."""
    names = ["a/b", "a-b", "a.b", "a_b", "ab"]
    assert len({ExperimentPaths(Path("/home"), name).trash for name in names}) == len(names)


def test_experiments_are_listed_with_their_groups(tmp_path: Path) -> None:
    """Listing finds folders with pymodules at any depth, sorted, and nothing inside them."""
    for name in ("b", "group/c", "a"):
        (tmp_path / "experiment_settings" / name / "pymodules" / "pymodules").mkdir(parents=True)
    (tmp_path / "experiment_settings" / "no_experiment").mkdir()
    assert settings_names(tmp_path) == ["a", "b", "group/c"]


def test_hidden_folders_are_not_listed(tmp_path: Path) -> None:
    """A half-written or half-deleted experiment is not shown as one."""
    (tmp_path / "experiment_results" / ".reset+a").mkdir(parents=True)
    (tmp_path / "experiment_results" / ".reset+a" / "state.json").touch()
    assert results_names(tmp_path) == []


def test_results_are_listed_by_their_state_file(tmp_path: Path) -> None:
    """A folder without a state file holds no results."""
    for name in ("done", "empty"):
        (tmp_path / "experiment_results" / name).mkdir(parents=True)
    (tmp_path / "experiment_results" / "done" / "state.json").touch()
    assert results_names(tmp_path) == ["done"]


def test_results_that_are_just_being_opened_are_not_listed(tmp_path: Path) -> None:
    """Before its first commit an experiment has no state file, but components may have saved files of that name."""
    folder = tmp_path / "experiment_results" / "group/opening/generations/1/data_counter_data/labels"
    folder.mkdir(parents=True)
    (folder / "state.json").touch()
    assert results_names(tmp_path) == []


def test_missing_data_home_has_no_experiments(tmp_path: Path) -> None:
    """Listing an empty place is not an error."""
    assert settings_names(tmp_path / "nowhere") == []
