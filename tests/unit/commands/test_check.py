"""The verb `check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.experiments import tree, write_experiment
from tests.support.verbs import call

RAISES = """
    from . import a

    loss_registers = ["loss_b", "error"]


    class ModuleTransform(a.ModuleTransform):
        def __call__(self, batch, modules):
            raise ValueError("no such column")
"""


def test_check_runs_a_batch_of_every_dataset(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each split of each dataset has gone through once, and nothing was written."""
    before = tree(home)
    assert call(home, "check", "tiny") == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    tried = [row for row in rows if row[-1] in ("train", "val")]
    assert tried == [["a", "train"], ["b", "train"], ["a", "val"], ["b", "val"]]
    assert tree(home) == before


def test_check_lists_problems_of_settings_and_pymodules_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One list names all that is wrong, in JSON files and in Python files."""
    write_experiment(
        tmp_path, files={"pymodules/modules/trunk.py": "module = 3\nsettings = {}\n"}, training={"sede": 1}
    )
    assert call(tmp_path, "check", "tiny") == 2
    said = capsys.readouterr().err
    assert "2 problems" in said
    assert "Did you mean 'seed'?" in said
    assert "modules/trunk.py" in said


def test_check_names_the_line_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What only shows with real data is found too, at the author's own line; other datasets are still tried."""
    write_experiment(tmp_path, files={"pymodules/module_transforms/b.py": RAISES})
    assert call(tmp_path, "check", "tiny") == 2
    shown = capsys.readouterr()
    assert "module_transforms/b.py:8: a train batch of b must go through, but raises ValueError" in shown.err
    assert "\na        train" in shown.out


def test_check_finds_losses_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that begins as NaN will not get better."""
    points = "from ..utils.points import Points\n\ndataset = Points(50, 0)\ndataset.targets[:] = float('nan')\n"
    write_experiment(tmp_path, files={"pymodules/datasets/a.py": points})
    assert call(tmp_path, "check", "tiny") == 2
    assert "'loss_a' must be finite, but is nan in the first train batch" in capsys.readouterr().err


def test_check_warns_of_parameters_nobody_reaches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A module that no batch reaches is most likely forgotten."""
    spare = "from torch import nn\n\nmodule = nn.Linear(8, 2)\nsettings = {}\n"
    optimizer = """
        from torch.optim import SGD

        from pipeline.components import BaseScheduler


        def create_optimizer(modules):
            return SGD([{"name": "spare", "params": modules["spare"].parameters()}], lr=0.1)


        def create_scheduler(optimizer):
            return BaseScheduler()
    """
    files = {"pymodules/modules/spare.py": spare, "pymodules/optim_sched/spare.py": optimizer}
    write_experiment(tmp_path, files=files)
    assert call(tmp_path, "check", "tiny") == 0
    assert "no gradient from one batch of each dataset: spare.weight, spare.bias" in capsys.readouterr().out


def test_check_takes_overrides(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A change can be tried before it is made."""
    assert call(home, "check", "tiny", "--no-batches", "--set", "data_loading.step_min_items=40") == 0
    assert "of at least 40 items" in capsys.readouterr().out
    assert call(home, "check", "tinny") == 2
