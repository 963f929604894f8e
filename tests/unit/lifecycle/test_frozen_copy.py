"""The frozen copy: everything an author wrote, nothing else, and nothing from outside."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InvalidExperiment
from pipeline.lifecycle.frozen_copy import copied_files, copy_folder, differing_files, digest_folder
from pipeline.system.disk import Disk
from tests.support.experiments import tree, write_experiment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny experiment's settings folder."""
    (tmp_path / "copy").mkdir()
    return write_experiment(tmp_path)


def refusal(folder: Path, name: str) -> str:
    """Return the one problem of an experiment's folder, which must name a file."""
    with pytest.raises(InvalidExperiment) as raised:
        copied_files(folder)
    (problem,) = raised.value.problems
    assert problem.where.endswith(name)
    return problem.what


def names(folder: Path) -> list[str]:
    """Return the copied files by path."""
    return [path.relative_to(folder).as_posix() for path in copied_files(folder)]


def test_everything_written_is_copied_with_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    """Code, settings, helpers and data files are all in the copy."""
    (folder / "pymodules/utils/table.npz").write_bytes(os.urandom(1000))
    sources = digest_folder(folder)
    digests = copy_folder(folder, tmp_path / "copy", sources, {}, Disk())
    copied = {name: content for name, (content, _) in tree(tmp_path / "copy").items()}
    assert copied == {name: content for name, (content, _) in tree(folder).items()}
    assert digests == sources == digest_folder(tmp_path / "copy")


def test_overridden_settings_are_written_into_the_copy(folder: Path, tmp_path: Path) -> None:
    """The copy holds what runs, and its digests are those of what it holds."""
    digests = copy_folder(folder, tmp_path / "copy", digest_folder(folder), {"training": {"seed": 9}}, Disk())
    assert json.loads((tmp_path / "copy/settings/training.json").read_text()) == {"seed": 9}
    assert digests == digest_folder(tmp_path / "copy")


def test_override_may_create_a_settings_file(tmp_path: Path) -> None:
    """training.json is optional, but what --set says of it is kept."""
    folder = write_experiment(tmp_path, files={"settings/training.json": None})
    (tmp_path / "copy").mkdir()
    digests = copy_folder(folder, tmp_path / "copy", digest_folder(folder), {"training": {"seed": 9}}, Disk())
    assert "settings/training.json" in digests


def test_file_edited_between_check_and_copy_is_refused(folder: Path, tmp_path: Path) -> None:
    """What was checked is what is copied, or nothing."""
    sources = digest_folder(folder)
    (folder / "pymodules/early_stopper.py").write_text("x = 1\n")
    with pytest.raises(InvalidExperiment, match=r"edited while .*pymodules/early_stopper\.py"):
        copy_folder(folder, tmp_path / "copy", sources, {}, Disk())


def test_link_out_of_the_experiment_is_refused(folder: Path, tmp_path: Path) -> None:
    """A copy would not be self-contained, or would carry off a secret."""
    (tmp_path / "outside.py").touch()
    (folder / "pymodules/utils/link.py").symlink_to(tmp_path / "outside.py")
    assert str(tmp_path / "outside.py") in refusal(folder, "utils/link.py")


def test_linked_folder_out_of_the_experiment_is_refused(folder: Path, tmp_path: Path) -> None:
    """The same holds for a whole folder."""
    (tmp_path / "outside").mkdir()
    (folder / "pymodules/utils/linked").symlink_to(tmp_path / "outside")
    assert "outside" in refusal(folder, "utils/linked")


def test_link_inside_the_experiment_is_copied_as_a_file(folder: Path, tmp_path: Path) -> None:
    """Two names for one file become two files."""
    (folder / "pymodules/utils/same.py").symlink_to("points.py")
    copy_folder(folder, tmp_path / "copy", digest_folder(folder), {}, Disk())
    copied = tmp_path / "copy/pymodules/utils/same.py"
    assert not copied.is_symlink()
    assert copied.read_bytes() == (folder / "pymodules/utils/points.py").read_bytes()


def test_dangling_link_is_refused(folder: Path) -> None:
    """A link to nothing is told, not skipped."""
    (folder / "settings/x.json").symlink_to("nowhere.json")
    assert "leads nowhere" in refusal(folder, "settings/x.json")


def test_loop_of_links_is_refused(folder: Path) -> None:
    """Two links to one another end in a message."""
    (folder / "pymodules/utils/a").symlink_to("b")
    (folder / "pymodules/utils/b").symlink_to("a")
    with pytest.raises(InvalidExperiment) as raised:
        copied_files(folder)
    assert [problem.where[-1] for problem in raised.value.problems] == ["a", "b"]


def test_link_to_a_folder_above_is_refused(folder: Path) -> None:
    """A folder that contains itself is not walked for ever."""
    (folder / "pymodules/utils/self").symlink_to("..")
    assert "regular file" in refusal(folder, "utils/self")


@pytest.mark.timeout(20)
def test_pipe_does_not_hang_the_copy(folder: Path) -> None:
    """A FIFO is refused without being opened."""
    os.mkfifo(folder / "pymodules/utils/pipe")
    assert "regular file" in refusal(folder, "utils/pipe")


@pytest.mark.parametrize(
    "name", [".a.py.swp", "a.py~", "#a.py#", ".DS_Store", "__pycache__/a.cpython-311.pyc", "a.pyc"]
)
def test_by_products_of_editors_are_not_copied(folder: Path, name: str) -> None:
    """An open editor neither ends up in the copy nor counts as a change."""
    before = digest_folder(folder)
    path = folder / "pymodules/datasets" / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert digest_folder(folder) == before


def test_files_beside_the_two_folders_are_not_copied(folder: Path) -> None:
    """Notes and data next to pymodules and settings stay where they are."""
    (folder / "notes.txt").touch()
    assert all(name.startswith(("pymodules/", "settings/")) for name in names(folder))


def test_order_does_not_depend_on_the_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders listed backwards give the same files in the same order."""
    expected, walk = names(folder), os.walk

    def backwards(top: Any, *arguments: Any, **more: Any) -> Iterator[Any]:
        for path, folders, files in walk(top, *arguments, **more):
            folders.reverse()
            yield path, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert names(folder) == expected


def test_edited_new_and_missing_files_differ(folder: Path) -> None:
    """A resume lists everything that is not what was copied."""
    digests = digest_folder(folder)
    (folder / "settings/logging.json").write_text("{}")
    (folder / "pymodules/utils/new.py").touch()
    (folder / "pymodules/loss_weighter.py").unlink()
    expected = ["pymodules/loss_weighter.py", "pymodules/utils/new.py", "settings/logging.json"]
    assert differing_files(folder, digests) == expected


def test_touched_file_does_not_differ(folder: Path) -> None:
    """Content decides, not the time stamp."""
    digests = digest_folder(folder)
    os.utime(folder / "settings/logging.json", (0, 0))
    assert differing_files(folder, digests) == []


def test_settings_folder_that_is_gone_differs_in_every_file(folder: Path) -> None:
    """Deleting the settings after the start is an edit like any other."""
    digests = digest_folder(folder)
    assert differing_files(folder / "nowhere", digests) == sorted(digests)
