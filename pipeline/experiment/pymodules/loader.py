"""Importing an experiment's Python files under a private package, so that they shadow nothing."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from pipeline import components
from pipeline.components import Parameters
from pipeline.errors import Problem, nearest
from pipeline.experiment.pymodules.assumptions import SINGLES, Assumption, assumed_files, describe_file
from pipeline.experiment.pymodules.copied_code import CopyFinder
from pipeline.experiment.pymodules.source_files import COMPONENT_NAME, is_ignored
from pipeline.experiment.pymodules.user_code import user_problem
from pipeline.paths import number_variable
from pipeline.system.seeding import seed_generators
from pipeline.system.stop_requests import TimeLimit

FAMILIES = (
    "datasets",
    "data_counters",
    "data_transforms",
    "dataloaders",
    "modules",
    "module_transforms",
    "metrics",
    "optim_sched",
    "hooks",
    "trackers",
)
# The least that an experiment consists of; all other files have defaults, or are not needed.
REQUIRED_FAMILIES = ("datasets", "modules", "module_transforms", "optim_sched")
UTILS = "utils"
IMPORT_TIME_LIMIT_VARIABLE = "GORIDEEPSTYLE_IMPORT_TIMEOUT"
_PREFIX = "_experiment_pymodules_"
_packages = itertools.count()


def relocate(source: Path, target: Path) -> None:
    """Let modules loaded from one folder read and import whatever they still need from its copy."""
    # The author may edit the original while the run continues: a late import must still find the frozen files.
    for name, module in list(sys.modules.items()):
        if name.startswith(_PREFIX):
            if str(getattr(module, "__file__", None) or "").startswith(str(source)):
                module.__file__ = str(target / Path(str(module.__file__)).relative_to(source))
            if hasattr(module, "__path__"):
                module.__path__ = [str(path).replace(str(source), str(target), 1) for path in module.__path__]


class PymoduleLoader:
    """Imports the files of one ``pymodules`` folder and collects what is wrong with them.

    ``original`` is the folder that it is a copy of.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        parameters: Mapping[str, Any] = MappingProxyType({}),
        original: Path | None = None,
    ) -> None:
        self.folder = folder
        self.problems = list[Problem]()
        self.failed_families: set[str] = set()
        # What stands for files that were left out.
        self.assumptions = list[Assumption]()
        self._seed = seed
        self._parameters = Parameters(parameters)
        # One process may load several experiments, or one twice: each load has a package of its own.
        self._package = f"{_PREFIX}{next(_packages)}"
        if original is not None:
            sys.meta_path.insert(0, CopyFinder(self._package, folder, original))

    def load(self, wanted: Collection[str] = ("", *FAMILIES)) -> dict[str, dict[str, ModuleType]]:
        """Return every imported file of the wanted families by family and name; singles are the family ''."""
        self.problems += self._layout_problems()
        # Each file takes the name from there while it is imported, so experiments in one process do not mix.
        components.parameters = self._parameters
        # A package made by hand lets files import each other relatively, under a name that nothing else has.
        package = ModuleType(self._package)
        package.__path__ = [str(self.folder)]
        sys.modules[self._package] = package
        seconds = number_variable(IMPORT_TIME_LIMIT_VARIABLE, 600)
        modules: dict[str, dict[str, ModuleType]] = {family: {} for family in wanted}
        present = list(self._files())
        assumed = assumed_files([path.relative_to(self.folder).as_posix() for _, path in present])
        self.assumptions += [describe_file(path, default) for path, default in assumed.items()]
        for family, path in present:
            if family not in wanted:
                continue
            if not COMPONENT_NAME.fullmatch(path.stem):
                self.problems.append(Problem(str(path), "file name must be made of letters, digits, '_' and '-'"))
                self.failed_families.add(family)
                continue
            # Modules draw their initial weights while they are imported. Each file has its own key, so that adding a
            # file does not change the weights of the others.
            seed_generators(self._seed, "pymodule", family, path.stem)
            name = ".".join(filter(None, (self._package, family, path.stem)))
            try:
                with TimeLimit(seconds, partial(TimeoutError, f"still importing after {seconds:g} seconds")):
                    modules[family][path.stem] = importlib.import_module(name)
            except (Exception, SystemExit) as error:
                self.problems.append(self._import_problem(path, error))
                self.failed_families.add(family)
        for relative, default in assumed.items():
            family, _, file = relative.rpartition("/")
            if family in wanted:
                modules[family][Path(file).stem] = self._import_default(relative, default)
        return modules

    def _import_default(self, relative: str, default: Path) -> ModuleType:
        """Import a file of ours under the name that the author's file would have."""
        name = ".".join((self._package, *Path(relative).with_suffix("").parts))
        spec = importlib.util.spec_from_file_location(name, default)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    def _files(self) -> Iterator[tuple[str, Path]]:
        for family in FAMILIES:
            for path in sorted((self.folder / family).glob("*.py")):
                if path.is_file() and not is_ignored(path.name) and path.name != "__init__.py":
                    yield family, path
        for single in SINGLES:
            if (path := self.folder / f"{single}.py").is_file():
                yield "", path

    def _layout_problems(self) -> Iterator[Problem]:
        """Yield files that no family knows, which would silently do nothing, and files that are missing."""
        known = [*FAMILIES, UTILS, *(f"{single}.py" for single in SINGLES)]
        for entry in sorted(self.folder.iterdir()):
            if entry.name not in known and not is_ignored(entry.name) and entry.name != "__init__.py":
                what = f"unknown file or folder; known are {', '.join(known)}.{nearest(entry.name, known)}"
                yield Problem(str(entry), what, "put helpers into utils/")
        present = {family for family, _ in self._files()}
        for family in REQUIRED_FAMILIES:
            if family not in present:
                yield Problem(str(self.folder / family), "must hold at least one .py file, but there is none")

    def _import_problem(self, path: Path, error: BaseException) -> Problem:
        problem = user_problem(error, self.folder, str(path), "must be importable")
        # An author does not know the name of the private package.
        problem = replace(problem, what=problem.what.replace(f"{self._package}.", ""))
        if isinstance(error, TimeoutError):
            return replace(problem, fix=f"set {IMPORT_TIME_LIMIT_VARIABLE} (seconds) if it needs longer")
        if not isinstance(error, ModuleNotFoundError):
            return replace(problem, fix=problem.fix or _find_remedy(str(error)))
        missing = str(error.name).removeprefix(f"{self._package}.")
        top = missing.partition(".")[0]
        if top in (*FAMILIES, UTILS):
            file = missing.replace(".", "/")
            fix = f"write pymodules/{file}.py, or import a file that exists"
            if (self.folder / f"{file}.py").exists() or (self.folder / file).is_dir():
                line = traceback.extract_tb(error.__traceback__)[-1].line or f"from {missing} import …"
                fix = f"files of an experiment import each other with two dots: {line.replace('from ', 'from ..', 1)}"
        else:
            # A helper of the author's that is imported by its bare name looks like a package that is not installed.
            own_file = f"a file of your own goes into utils/ and is imported as from ..utils.{top} import …"
            fix = f"pip install {top}; {own_file}"
        return replace(problem, fix=fix)


def _find_remedy(error: str) -> str:
    """Return how to repair what torch says while a file is imported; empty for everything else."""
    if "not compiled with CUDA" in error or "No CUDA GPUs" in error:
        return "leave devices to the pipeline: it moves modules and batches"
    if "can't allocate memory" in error or "out of memory" in error:
        return "build a smaller module, or use a machine with more memory"
    return ""
