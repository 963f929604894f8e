"""Which parameters pymodules use is found in their text."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from pipeline.experiment.checks.parameter_uses import doubtful_parameters

PARAMETERS = {"lr": 1, "opt": {"beta": 0.9, "eps": 1e-8}}
IMPORT = "from pipeline.components import parameters\n"


def doubts(folder: Path, text: str) -> list[str]:
    (folder / "pymodules").mkdir(exist_ok=True)
    (folder / "pymodules/a.py").write_text(dedent(text).lstrip("\n"))
    return [
        f"{Path(problem.where).name}: {problem.what}"
        for problem in doubtful_parameters(folder / "pymodules", PARAMETERS)
    ]


@pytest.mark.parametrize(
    "text",
    [
        IMPORT + "parameters.lr, parameters.opt.beta, parameters.opt.eps",
        IMPORT + "f(parameters.lr.real, **parameters.opt)",
        IMPORT + 'parameters["lr"], parameters["opt"].values()',
        IMPORT + "f(parameters)",
        IMPORT + 'getattr(parameters, "lr")',
        IMPORT + 'parameters.get("lr")',
        "from pipeline.components import parameters as p\np.lr, p.opt",
    ],
)
def test_every_way_to_use_a_parameter_counts(tmp_path: Path, text: str) -> None:
    """Whole objects, keys, methods and another name for the whole are uses as well."""
    assert doubts(tmp_path, text) == []


def test_unused_parameters_are_named(tmp_path: Path) -> None:
    """A value that nobody reads may be a misspelt one."""
    assert doubts(tmp_path, IMPORT + "parameters.opt.beta") == [
        "parameters.json: no pymodule uses lr",
        "parameters.json: no pymodule uses opt.eps",
    ]


def test_undefined_parameters_are_named_with_their_line(tmp_path: Path) -> None:
    """Code that was not run yet would fail late."""
    text = IMPORT + "parameters.opt\nparameters.lr\n\ndef predict():\n    return parameters.opt.bet\n"
    assert doubts(tmp_path, text) == [
        "a.py:6: parameters.opt.bet is not in settings/parameters.json. Did you mean 'beta'?"
    ]


def test_parameters_of_modules_are_something_else(tmp_path: Path) -> None:
    """torch's method has the same name."""
    assert doubts(tmp_path, "module.parameters()\nparameters = 3\nparameters.nothing\n") == [
        "parameters.json: no pymodule uses lr",
        "parameters.json: no pymodule uses opt.beta",
        "parameters.json: no pymodule uses opt.eps",
    ]
