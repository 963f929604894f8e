"""Cross-checks: what the files of an experiment say must fit together, and all misfits are told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.assembly import Experiment, assemble, read_checked_contents
from pipeline.experiment.checks.data import check_even_steps
from pipeline.experiment.checks.parameters import sparse_problems
from pipeline.experiment.settings.settings import parse_settings, read_contents
from tests.support.experiments import FILES, write_experiment

CPU = torch.device("cpu")
HEADS = """
    from torch.optim import SGD
    from pipeline.components import BaseScheduler

    def create_optimizer(modules):
        return SGD({groups}, lr=0.02)

    def create_scheduler(optimizer):
        return BaseScheduler()
"""


def assembled(home: Path, files: dict[str, str | None] | None = None, **settings: Any) -> Experiment:
    """Assemble the tiny experiment with some pymodules replaced."""
    named = {f"pymodules/{name}.py": text for name, text in (files or {}).items()}
    folder = write_experiment(home, files=named, **settings)
    return assemble(folder / "pymodules", parse_settings(read_contents(folder / "settings")), CPU)


def problems_of(home: Path, files: dict[str, str | None] | None = None, **settings: Any) -> list[Problem]:
    """Return all problems that assembling gives."""
    with pytest.raises(InvalidExperiment) as raised:
        assembled(home, files, **settings)
    return list(raised.value.problems)


def only_problem(home: Path, files: dict[str, str | None] | None = None, **settings: Any) -> Problem:
    """Return the one problem that assembling gives."""
    problems = problems_of(home, files, **settings)
    assert len(problems) == 1, problems
    return problems[0]


def heads(groups: str) -> dict[str, str | None]:
    """Return the optimizer file of the two heads with other param groups."""
    return {"optim_sched/heads": HEADS.replace("{groups}", groups)}


def test_tiny_experiment_fits_together(tmp_path: Path) -> None:
    """The experiment that all these tests break is in order."""
    experiment = assembled(tmp_path)
    assert list(experiment.components.datasets) == ["a", "b"]
    assert experiment.learning_rates() == {"heads": {"heads": 0.02}, "trunk": {"trunk": 0.01}}


def test_every_dataset_needs_a_module_transform(tmp_path: Path) -> None:
    """A dataset without one is told with the file to write: nothing can stand for what becomes of its batches."""
    problems = problems_of(tmp_path, {"module_transforms/b": None})
    assert problems[0].where.endswith("pymodules/module_transforms/b.py")
    assert "missing for dataset 'b'" in problems[0].what


@pytest.mark.parametrize("family", ["data_transforms", "dataloaders", "module_transforms"])
def test_file_named_like_no_dataset_is_told_with_the_names(tmp_path: Path, family: str) -> None:
    """A file that would never be used is refused, with the datasets there are."""
    copied = f"from .a import *\n{'loss_registers = []' if family == 'module_transforms' else ''}\n"
    problem = only_problem(tmp_path, {f"{family}/c": copied})
    assert problem.where.endswith(f"{family}/c.py")
    assert "there are a, b" in problem.what


def test_register_that_a_transform_invents_is_told_with_the_nearest(tmp_path: Path) -> None:
    """Both the place and the registers there are, are named."""
    text = "from .a import ModuleTransform\nloss_registers = ['loss_b', 'eror']\n"
    problem = only_problem(tmp_path, {"module_transforms/b": text})
    assert "module_transforms/b.py" in problem.where
    assert "'eror'" in problem.what
    assert "error, loss_a, loss_b" in problem.what
    assert "Did you mean 'error'?" in problem.what


def test_register_that_nobody_feeds_is_told(tmp_path: Path) -> None:
    """A register that would stay empty is refused at the settings file."""
    registers = {"loss_registers": ["loss_a", "loss_b", "error", "lost"]}
    problem = only_problem(tmp_path, loss_registers=registers)
    assert problem.where.endswith("settings/loss_registers.json:6")
    assert "'lost' is fed by no module transform" in problem.what


def test_register_listed_twice_is_told(tmp_path: Path) -> None:
    """Two registers of one name would share a folder."""
    registers = {"loss_registers": ["loss_a", "loss_b", "error", {"name": "error", "optimize": False}]}
    assert "'error' must be listed once, but is listed 2 times" in only_problem(tmp_path, loss_registers=registers).what


def test_register_of_several_lines_is_told_at_its_name(tmp_path: Path) -> None:
    """The line is that of the name, and a register that only --set has added has none."""
    text = '{"loss_registers": ["loss_a", "loss_b", "error",\n{"optimize": false,\n"name": "lost"}]}'
    folder = write_experiment(tmp_path, files={"settings/loss_registers.json": text})
    overrides = ('loss_registers.loss_registers=["loss_a", "loss_b", "error", "lost", "more"]',)
    settings = parse_settings(read_contents(folder / "settings", overrides))
    with pytest.raises(InvalidExperiment) as raised:
        assemble(folder / "pymodules", settings, CPU)
    file = folder / "settings" / "loss_registers.json"
    assert [problem.where for problem in raised.value.problems] == [f"{file}:3", str(file)]


def test_nothing_to_optimise_is_told(tmp_path: Path) -> None:
    """At least one register must have a gradient."""
    registers = [{"name": name, "optimize": False} for name in ("loss_a", "loss_b", "error")]
    problem = only_problem(tmp_path, loss_registers={"loss_registers": registers})
    assert "at least one register must be optimised" in problem.what


def test_counter_of_unknown_dataset_is_told(tmp_path: Path) -> None:
    """A counter names datasets that exist."""
    text = (
        "from pipeline.components import DatasetSizeCounter\ndata_counter = DatasetSizeCounter()\n"
        "dataset_names = ['a', 'digits']\n"
    )
    problem = only_problem(tmp_path, {"data_counters/sizes": text})
    assert "data_counters/sizes.py" in problem.where
    assert "'digits'" in problem.what
    assert "there are a, b" in problem.what


def test_everything_frozen_is_told(tmp_path: Path) -> None:
    """Without a trained module there is nothing to do."""
    frozen = "from torch import nn\nmodule = nn.Linear(8, 1)\nsettings = {'frozen': True}\n"
    first, *others = problems_of(tmp_path, {f"modules/{name}": frozen for name in ("trunk", "head_a", "head_b")})
    assert "all are frozen: head_a, head_b, stem, trunk" in first.what
    assert all("frozen parameters must be in no optimizer" in problem.what for problem in others)


def test_parameter_in_no_optimizer_is_told(tmp_path: Path) -> None:
    """Every parameter that nobody trains is named with its module."""
    groups = "[{'name': 'heads', 'params': modules['head_a'].parameters()}]"
    problem = only_problem(tmp_path, heads(groups))
    assert "modules/head_b.py" in problem.where
    assert "every parameter must be in exactly one optimizer, but 'weight', 'bias' are in none" in problem.what


def test_parameter_in_two_optimizers_is_told(tmp_path: Path) -> None:
    """Both optimizers are named."""
    groups = (
        "[{'name': 'a', 'params': modules['head_a'].parameters()}, {'name': 'b', 'params': "
        "[*modules['head_b'].parameters(), modules['trunk'][1].bias]}]"
    )
    problem = only_problem(tmp_path, heads(groups))
    assert "modules/trunk.py" in problem.where
    assert "every parameter must be in exactly one optimizer, but '1.bias' are in heads and trunk" in problem.what


def test_frozen_parameter_in_an_optimizer_is_told(tmp_path: Path) -> None:
    """A frozen module's parameters are in none."""
    groups = (
        "[{'name': 'heads', 'params': [*modules['head_a'].parameters(), *modules['head_b'].parameters(), "
        "modules['stem'][0].weight]}]"
    )
    problem = only_problem(tmp_path, heads(groups))
    assert "modules/stem.py" in problem.where
    assert "frozen parameters must be in no optimizer, but '0.weight' are in heads" in problem.what


TWO_GROUPS = "[{**names, 'params': modules[head].parameters()} for names, head in zip(({}), ('head_a', 'head_b'))]"


@pytest.mark.parametrize("names", ["{'name': 'group_1'}, {}", "{'name': 'x'}, {'name': 'x'}", "{'name': 1}, {}"])
def test_param_groups_need_names_of_their_own(tmp_path: Path, names: str) -> None:
    """Learning rates are stored by group name, so no two groups share one."""
    problem = only_problem(tmp_path, heads(TWO_GROUPS.replace("({})", f"({names})")))
    assert "optim_sched/heads.py" in problem.where
    assert "every param group must have a 'name' of its own" in problem.what


@pytest.mark.parametrize(("names", "expected"), [("{}, {}", "group_0 group_1"), ("{'name': 'x'}, {}", "x group_1")])
def test_group_without_a_name_is_named_after_its_place(tmp_path: Path, names: str, expected: str) -> None:
    """Whoever has no use for names need not invent any."""
    experiment = assembled(tmp_path, heads(TWO_GROUPS.replace("({})", f"({names})")))
    assert list(experiment.learning_rates()["heads"]) == expected.split()


@pytest.mark.parametrize("name", ["../x", "/x", "", "a\\nb", "a\\0b", "x" * 300])
def test_param_group_with_an_odd_name_is_told(tmp_path: Path, name: str) -> None:
    """Records name a column after each group: a name that could not be read back is refused at the start."""
    parameters = "[*modules['head_a'].parameters(), *modules['head_b'].parameters()]"
    problem = only_problem(tmp_path, heads(f"[{{'name': '{name}', 'params': {parameters}}}]"))
    assert "the name of a param group must be" in problem.what


def test_empty_train_split_is_told(tmp_path: Path) -> None:
    """A dataset without training points is refused at its file."""
    text = "from ..utils.points import Points\n\nclass Empty(Points):\n    def get_split_idxs(self, split):\n"
    text += "        return [] if split == 'train' else [0]\n\ndataset = Empty(5, 1)\n"
    problem = only_problem(tmp_path, {"datasets/b": text})
    assert "datasets/b.py" in problem.where
    assert "train split must have points" in problem.what


def without_val(name: str) -> str:
    """Return a dataset file whose val split is empty."""
    return (
        "from ..utils.points import Points\n\nclass NoVal(Points):\n    def get_split_idxs(self, split):\n"
        f"        return list(range(9)) if split == 'train' else []\n\ndataset = NoVal(9, {len(name)})\n"
    )


def test_register_without_validation_points_is_told(tmp_path: Path) -> None:
    """A register that no evaluation would ever reach is refused, unless nothing is evaluated."""
    problem = only_problem(tmp_path, {"datasets/b": without_val("b")})
    assert "register 'loss_b' is fed by b, whose val splits have 0 points" in problem.what
    assert "training.evaluation_interval" in problem.fix
    assert assembled(tmp_path, {"datasets/b": without_val("b")}, training={"evaluation_interval": 0})


@pytest.mark.parametrize(
    "returned", ["None", "[[0, 1]]", "[0.5]", "['a']", "1 / 0"], ids=["none", "nested", "floats", "text", "raising"]
)
def test_split_that_is_no_list_of_indices_is_told(tmp_path: Path, returned: str) -> None:
    """What get_split_idxs returns is checked before training."""
    text = "from ..utils.points import Points\n\nclass Odd(Points):\n    def get_split_idxs(self, split):\n"
    problem = only_problem(tmp_path, {"datasets/b": f"{text}        return {returned}\n\ndataset = Odd(5, 1)\n"})
    assert "datasets/b.py" in problem.where
    assert "get_split_idxs must return the indices" in problem.what


def test_all_misfits_are_told_together(tmp_path: Path) -> None:
    """Problems of imports, contracts and names across files come in one list."""
    files = {
        "data_counters/broken": "1 / 0\n",
        "dataloaders/a": "train_dataloader_args = {'batch_size': 0}\n",
        "data_transforms/b": "from .a import NoSuchTransform\n",
        "module_transforms/b": "from .a import ModuleTransform\nloss_registers = ['loss_x']\n",
        "early_stopper": "early_stopper = 3\n",
    }
    shown = str(InvalidExperiment(problems_of(tmp_path, files)))
    for place in ("broken.py:1", "dataloaders/a.py:1", "data_transforms/b.py", "module_transforms/b.py"):
        assert place in shown
    assert "early_stopper.py:1" in shown


def test_optimizer_function_that_raises_is_told_with_its_line(tmp_path: Path) -> None:
    """A misspelt module name in create_optimizer is the author's line, not ours."""
    problem = only_problem(tmp_path, heads("[{'name': 'heads', 'params': modules['haed_a'].parameters()}]"))
    assert problem.where.endswith("optim_sched/heads.py:5")
    assert "KeyError: 'haed_a'" in problem.what


def test_optimizer_function_must_return_an_optimizer(tmp_path: Path) -> None:
    """A forgotten return is told with what came back."""
    text = HEADS.replace("return SGD({groups}, lr=0.02)", "pass")
    problem = only_problem(tmp_path, {"optim_sched/heads": text})
    assert "must return a torch optimizer, but returns NoneType" in problem.what


def test_scheduler_function_must_return_a_scheduler(tmp_path: Path) -> None:
    """One of torch's own schedulers needs its adapter, and the message names it."""
    groups = "[{'name': 'h', 'params': [*modules['head_a'].parameters(), *modules['head_b'].parameters()]}]"
    text = HEADS.replace("{groups}", groups).replace("BaseScheduler()", "StepLR(optimizer, 1)")
    text = text.replace("import SGD", "import SGD\n    from torch.optim.lr_scheduler import StepLR")
    assert "return TorchScheduler(StepLR(…))" in only_problem(tmp_path, {"optim_sched/heads": text}).fix


def test_sync_batchnorm_without_cuda_is_told(tmp_path: Path) -> None:
    """A setting that this machine cannot honour is refused, not ignored."""
    problem = only_problem(tmp_path, training={"sync_batchnorm": True})
    assert "sync_batchnorm" in problem.where
    assert "accelerator" in problem.what


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", 2.0**0.5)])
def test_learning_rates_are_scaled_by_the_items_of_a_step(tmp_path: Path, rule: str, factor: float) -> None:
    """With 14 items per step and 7 as the base, rates grow by 2 or by its root."""
    rates = assembled(tmp_path, training={"lr_scaling": {"base_items": 7, "rule": rule}}).learning_rates()
    assert rates["heads"]["heads"] == pytest.approx(0.02 * factor)


def test_frozen_module_stays_in_evaluation_mode(tmp_path: Path) -> None:
    """Neither dropout nor batch statistics of a frozen module ever change."""
    experiment = assembled(tmp_path)
    experiment.set_training(True)
    modules = experiment.components.all_modules
    assert modules["trunk"].training
    assert not modules["stem"].training
    assert not any(parameter.requires_grad for parameter in modules["stem"].parameters())


def test_problems_of_different_kinds_are_in_one_list(tmp_path: Path) -> None:
    """An empty split, two groups of one name and a scheduler that is none do not hide one another."""
    empty = "from ..utils.points import Points\ndataset = Points(0, 0)\n"
    plateau = """
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau


def create_optimizer(modules):
    heads = [modules["head_a"], modules["head_b"]]
    return SGD([{"name": "head", "params": head.parameters()} for head in heads], lr=0.1)


def create_scheduler(optimizer):
    return ReduceLROnPlateau(optimizer)
"""
    found = [problem.what for problem in problems_of(tmp_path, {"datasets/a": empty, "optim_sched/heads": plateau})]
    assert len(found) == 3
    for words in (
        "the train split must have points",
        "must have a 'name' of its own",
        "create_scheduler must return an object with a method",
    ):
        assert any(words in what for what in found)


def test_frozen_modules_do_not_hide_an_empty_split(tmp_path: Path) -> None:
    """What names say and what data say is in one list, too."""
    frozen = "from torch import nn\nmodule = nn.Linear(8, 1)\nsettings = {'frozen': True}\n"
    files: dict[str, str | None] = {f"modules/{name}": frozen for name in ("trunk", "head_a", "head_b")}
    files["datasets/a"] = "from ..utils.points import Points\ndataset = Points(0, 0)\n"
    found = [problem.what for problem in problems_of(tmp_path, files)]
    for words in ("all are frozen", "the train split must have points"):
        assert any(words in what for what in found)


def test_transform_without_a_dataset_is_one_problem(tmp_path: Path) -> None:
    """A slip in a file name is reported from both sides, whatever else is asked about the dataset."""
    renamed = {"module_transforms/b": None, "module_transforms/bb": FILES["pymodules/module_transforms/b.py"]}
    found = [str(problem) for problem in problems_of(tmp_path, renamed)]
    for words in (
        "bb.py: must be named like a dataset, but there are a, b. Did",
        "b.py: the file is missing for dataset",
    ):
        assert any(f"module_transforms/{words}" in problem for problem in found)


def test_wrong_settings_do_not_hide_wrong_pymodules(tmp_path: Path) -> None:
    """A misspelt register in a pymodule is found although another settings file is wrong."""
    weighter = (
        "from pipeline.components import StaticLossWeighter\nloss_weighter = StaticLossWeighter({'los_a': 1.0})\n"
    )
    folder = write_experiment(tmp_path, files={"pymodules/loss_weighter.py": weighter}, training={"sed": 1})
    with pytest.raises(InvalidExperiment) as raised:
        read_checked_contents(folder)
    wrong_key, wrong_register = raised.value.problems
    assert "Did you mean 'seed'?" in wrong_key.what
    assert "Did you mean 'loss_a'?" in wrong_register.what


def test_optimizer_that_needs_a_closure_is_refused(tmp_path: Path) -> None:
    """LBFGS evaluates the loss several times per update, which a step over all ranks cannot do."""
    lbfgs = """
from torch.optim import LBFGS

from pipeline.components import BaseScheduler


def create_optimizer(modules):
    optimizer = LBFGS([*modules["head_a"].parameters(), *modules["head_b"].parameters()])
    optimizer.param_groups[0]["name"] = "heads"
    return optimizer


def create_scheduler(optimizer):
    return BaseScheduler()
"""
    problem = only_problem(tmp_path, {"optim_sched/heads": lbfgs})
    assert "optim_sched/heads.py" in problem.where
    assert "LBFGS.step needs a closure" in problem.what


@pytest.mark.parametrize(
    ("settings", "world_size", "reason"),
    [
        ({"gradient_reduction": "exact"}, 1, "gradient_reduction: exact"),
        ({"parallelism": "fsdp"}, 1, "parallelism: fsdp"),
        ({}, 2, "2 processes"),
        ({}, 1, None),
    ],
)
def test_sparse_gradients_are_refused_where_ranks_add_them(
    tmp_path: Path, settings: dict[str, Any], world_size: int, reason: str | None
) -> None:
    """One process with the fast reduction has nobody to add them with."""
    head = "from torch import nn\nmodule = nn.Sequential(nn.Linear(8, 1), nn.Embedding(3, 2, sparse=True))\n"
    components = assembled(tmp_path, {"modules/head_a": head + "settings = {}\n"}).components
    folder = write_experiment(tmp_path, "other", training=settings)
    parsed = parse_settings(read_contents(folder / "settings"))
    found = [problem.what for problem in sparse_problems(components, parsed, folder, world_size)]
    assert found == ([f"1 must have dense gradients with {reason}, but has sparse=True"] if reason else [])


def test_steps_that_ranks_cannot_share_evenly_are_refused() -> None:
    """With synchronised BatchNorm, each dataset's batches of every step are shared out evenly."""
    check_even_steps([["a", "b", "a", "b"], ["a", "a"]], world_size=2)
    with pytest.raises(InvalidExperiment, match="2 processes, but step 2 has 1 of dataset 'b'") as raised:
        check_even_steps([["a", "a"], ["a", "b", "a"]], world_size=2)
    assert raised.value.is_shared
