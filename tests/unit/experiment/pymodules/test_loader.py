"""An experiment's Python files are imported under a private package, and what is wrong is told with file and line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from pipeline.errors import Problem
from pipeline.experiment.pymodules.loader import IMPORT_TIME_LIMIT_VARIABLE, PymoduleLoader, is_ignored
from tests.support.experiments import tree, write_experiment
from tests.support.running import ENTRY, environment


def load(home: Path, seed: int = 0, **files: str | None) -> tuple[dict[str, dict[str, ModuleType]], list[Problem]]:
    """Load the tiny experiment with some pymodules replaced; ``__`` in a name stands for a folder."""
    named = {f"pymodules/{name.replace('__', '/')}.py": text for name, text in files.items()}
    loader = PymoduleLoader(write_experiment(home, files=named) / "pymodules", seed)
    return loader.load(), loader.problems


def only_problem(home: Path, **files: str | None) -> Problem:
    """Return the one problem that loading gives."""
    _, problems = load(home, **files)
    assert len(problems) == 1, problems
    return problems[0]


def test_folder_called_datasets_shadows_nothing(tmp_path: Path) -> None:
    """Importing adds no such top-level module, so an installed package called datasets or utils stays what it is."""
    before = set(sys.modules)
    found, problems = load(tmp_path)
    added = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not problems
    assert not {"datasets", "dataloaders", "modules", "utils", "early_stopper"} & added
    assert found["datasets"]["a"].__name__.startswith("_experiment_pymodules_")


def test_pymodules_are_not_on_the_import_path(tmp_path: Path) -> None:
    """Other code cannot pick up an experiment's files by accident."""
    before = list(sys.path)
    load(tmp_path)
    assert sys.path == before


def test_two_experiments_in_one_process_are_apart(tmp_path: Path) -> None:
    """Loading again gives new modules, not those of the experiment before."""
    first, _ = load(tmp_path)
    second, _ = load(tmp_path)
    assert first["modules"]["trunk"] is not second["modules"]["trunk"]


def test_files_import_each_other_relatively(tmp_path: Path) -> None:
    """A file may use a neighbour, and the neighbour is the same object that the pipeline uses."""
    found, problems = load(tmp_path, datasets__b="from .a import dataset\n")
    assert not problems
    assert found["datasets"]["b"].dataset is found["datasets"]["a"].dataset


def test_files_are_imported_in_sorted_order(tmp_path: Path) -> None:
    """The order of imports does not depend on the file system."""
    text = "import sys\nsys.order = [*getattr(sys, 'order', []), __name__]\nfrom .a import dataset\n"
    try:
        load(tmp_path, datasets__z=text, datasets__c=text, datasets__k=text)
        assert [name[-1] for name in sys.order] == ["c", "k", "z"]  # type: ignore[attr-defined]
    finally:
        del sys.order  # type: ignore[attr-defined]


def test_initial_weights_follow_from_the_seed_and_the_file(tmp_path: Path) -> None:
    """The same seed gives the same weights, another seed or another file gives others."""
    first, again, other = (load(tmp_path, seed)[0]["modules"] for seed in (1, 1, 2))
    assert torch.equal(first["head_a"].module.weight, again["head_a"].module.weight)
    assert not torch.equal(first["head_a"].module.weight, other["head_a"].module.weight)
    assert not torch.equal(first["head_a"].module.weight, first["head_b"].module.weight)


def test_initial_weights_do_not_depend_on_other_files(tmp_path: Path) -> None:
    """Adding a file that draws random numbers changes no other file's draws."""
    alone, _ = load(tmp_path)
    drawing = "import torch\nfrom torch import nn\ntorch.randn(100)\nmodule = nn.Linear(9, 9)\nsettings = {}\n"
    beside, _ = load(tmp_path, modules__aaa=drawing)
    assert torch.equal(alone["modules"]["trunk"].module[0].weight, beside["modules"]["trunk"].module[0].weight)


BROKEN = {
    "syntax error": ("x = 1\ndef f(:\n    pass\n", ":2", "valid Python"),
    "exception": ("x = 1\n\nraise KeyError('oops')\n", ":3", "KeyError: 'oops'"),
    "sys.exit(0)": ("import sys\nsys.exit(0)\n", ":2", "sys.exit(0)"),
    "unknown package": ("x = 1\nimport no_such_package_anywhere\n", ":2", "no_such_package_anywhere"),
    "unknown neighbour": ("from ..utils.nothing import x\n", ":1", "utils.nothing"),
    "unknown name": ("x = 1\n\nfrom ..utils.points import Pionts\n", ":3", "Pionts"),
    "null byte": ("x = 1\0\n", "a.py", "null bytes"),
}


@pytest.mark.parametrize(("text", "line", "what"), BROKEN.values(), ids=BROKEN.keys())
def test_file_that_cannot_be_imported_is_told_with_its_line(tmp_path: Path, text: str, line: str, what: str) -> None:
    """Whatever goes wrong at import is one problem at the author's own file and line."""
    problem = only_problem(tmp_path, data_counters__a=text)
    assert problem.where.startswith(str(tmp_path))
    assert problem.where.endswith(("data_counters/a.py" + line) if line.startswith(":") else line)
    assert what in problem.what


def test_exception_in_a_helper_is_told_at_the_helpers_line(tmp_path: Path) -> None:
    """The innermost of the author's own files is the place to look."""
    helper = "def make():\n    return 1 / 0\n"
    problem = only_problem(
        tmp_path, utils__broken=helper, data_counters__x="from ..utils.broken import make\n\nmake()\n"
    )
    assert problem.where.endswith("utils/broken.py:2")
    assert "ZeroDivisionError" in problem.what


def test_exception_in_a_library_is_told_at_the_authors_line(tmp_path: Path) -> None:
    """Frames of installed packages are left out."""
    problem = only_problem(tmp_path, data_counters__x="import json\n\njson.loads('{')\n")
    assert problem.where.endswith("data_counters/x.py:3")


@patch.dict(os.environ, {IMPORT_TIME_LIMIT_VARIABLE: "0.3"})
def test_endless_import_is_ended_and_told(tmp_path: Path) -> None:
    """A file that never finishes importing is interrupted at the limit and told with its line."""
    problem = only_problem(tmp_path, data_counters__x="import time\n\nwhile True:\n    time.sleep(0.01)\n")
    assert "data_counters/x.py:" in problem.where
    assert "still importing after 0.3 seconds" in problem.what
    assert IMPORT_TIME_LIMIT_VARIABLE in problem.fix


def test_all_broken_files_are_told_at_once(tmp_path: Path) -> None:
    """One broken file does not hide the next."""
    _, problems = load(tmp_path, data_counters__x="x = \n", data_counters__y="1 / 0\n", early_stopper="x")
    places = " ".join(problem.where for problem in problems)
    assert all(name in places for name in ("x.py:1", "y.py:1", "early_stopper.py"))


@pytest.mark.parametrize(
    ("wrong", "right"), [("dataset", "datasets"), ("data_transform", "data_transforms"), ("optim_shed", "optim_sched")]
)
def test_unknown_folder_is_told_with_the_nearest(tmp_path: Path, wrong: str, right: str) -> None:
    """A misspelt folder would silently be ignored, so it is refused."""
    problem = only_problem(tmp_path, **{f"{wrong}__x": "x = 1\n"})
    assert problem.where.endswith(f"pymodules/{wrong}")
    assert f"Did you mean '{right}'?" in problem.what


def test_unknown_file_is_told_with_the_nearest(tmp_path: Path) -> None:
    """The same holds for the three single files."""
    problem = only_problem(tmp_path, early_stoper="x = 1\n")
    assert "Did you mean 'early_stopper.py'?" in problem.what


@pytest.mark.parametrize("name", ["checkpoint_saver", "early_stopper", "loss_weighter", "data_transforms/b"])
def test_file_of_ours_stands_for_one_that_is_left_out(tmp_path: Path, name: str) -> None:
    """The file that is loaded instead is what the frozen copy will hold, and it is named."""
    files = {f"pymodules/{name}.py": None}
    loader = PymoduleLoader(write_experiment(tmp_path, files=files) / "pymodules", 0)
    family, _, stem = name.rpartition("/")
    module = loader.load()[family][stem]
    assert not loader.problems
    assert "defaults" in Path(str(module.__file__)).parts
    assert [assumption.where for assumption in loader.assumptions] == [f"pymodules/{name}.py"]


def test_empty_family_is_told(tmp_path: Path) -> None:
    """A family without files is named, unless it has defaults or is not needed."""
    without = {"optim_sched__heads": None, "optim_sched__trunk": None, "data_counters__sides": None}
    problem = only_problem(tmp_path, **without)
    assert problem.where.endswith("pymodules/optim_sched")


@pytest.mark.parametrize("name", ["a b", "a.b", "ä"])
def test_file_name_that_is_no_component_name_is_told(tmp_path: Path, name: str) -> None:
    """Names of files become names of results, so they are as strict."""
    problem = only_problem(tmp_path, **{f"data_counters__{name}": "x = 1\n"})
    assert "file name must be" in problem.what


@pytest.mark.parametrize("name", ["__pycache__", ".a.py.swp", "a.py~", "#a.py#", "a.pyc", ".DS_Store", "a.py.bak"])
def test_by_products_of_editors_are_ignored(name: str) -> None:
    """What editors and interpreters leave behind is no part of an experiment."""
    assert is_ignored(name)


@pytest.mark.parametrize("name", ["a.py", "a.pyi", "digits.npz", "bak.py", "tmp", "__init__.py"])
def test_files_of_an_author_are_not_ignored(name: str) -> None:
    """Names that merely look like by-products are kept."""
    assert not is_ignored(name)


def test_loading_writes_nothing_into_the_settings_folder(home: Path) -> None:
    """A refused experiment leaves no bytecode beside what the author wrote."""
    (home / "experiment_settings/tiny/pymodules/early_stopper.py").write_text("1 / 0\n")
    before = tree(home)
    line = [sys.executable, str(ENTRY), "tiny", "--data-home", str(home)]
    env = {key: value for key, value in environment().items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    assert tree(home) == before
