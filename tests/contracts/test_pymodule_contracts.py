"""What each pymodule must define: broken contracts are told, and following one is enough without inheriting."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import Problem
from pipeline.experiment.pymodules.contracts import ContractReader
from pipeline.experiment.pymodules.definitions import Components
from pipeline.experiment.pymodules.loader import PymoduleLoader
from tests.support.experiments import write_experiment
from tests.support.running import run_inside

LOADERS = "train_dataloader_args = {args}\neval_dataloader_args = {'batch_size': 4}\n"
MODULE = "from torch import nn\nmodule = nn.Linear(8, 1)\nsettings = {settings}\n"


def read(home: Path, **files: str) -> tuple[Components, list[Problem]]:
    """Read the contracts of the tiny experiment with some pymodules replaced; ``__`` stands for a folder."""
    named = {f"pymodules/{name.replace('__', '/')}.py": text for name, text in files.items()}
    loader = PymoduleLoader(write_experiment(home, files=named) / "pymodules", 0)
    reader = ContractReader(loader.load())
    assert not loader.problems, loader.problems
    return reader.read(), reader.problems


def only_problem(home: Path, **files: str) -> Problem:
    """Return the one problem that reading gives."""
    _, problems = read(home, **files)
    assert len(problems) == 1, problems
    return problems[0]


MISSING = {
    "dataset": ("datasets__a", "datset = 3\n", "dataset is not defined", "'datset'"),
    "counter": ("data_counters__sides", "dataset_names = []\n", "data_counter is not defined", ""),
    "counted datasets": ("data_counters__x", "from .sides import data_counter\n", "dataset_names is not defined", ""),
    "transform": ("data_transforms__b", "EvalDataTransfrom = 1\n", "EvalDataTransform is not defined", "Transfrom'"),
    "loader": (
        "dataloaders__a",
        "from .b import train_dataloader_args\neval_dataloader_arg = {}\n",
        "eval_dataloader_args is not defined",
        "'eval_dataloader_arg'",
    ),
    "module settings": (
        "modules__head_a",
        "from .head_b import module\nsetings = {'frozen': True}\n",
        "settings is not defined",
        "'setings'",
    ),
    "module": ("modules__head_a", "settings = {}\n", "module is not defined", ""),
    "registers": ("module_transforms__b", "from .a import ModuleTransform\n", "loss_registers is not defined", ""),
    "scheduler": (
        "optim_sched__heads",
        "from .trunk import create_optimizer\n\ndef creat_scheduler(optimizer):\n    pass\n",
        "create_scheduler is not defined",
        "'creat_scheduler'",
    ),
    "tracker": ("trackers__mine", "traker = 3\n", "tracker is not defined", "'traker'"),
    "stopper": ("early_stopper", "early_stoper = 3\n", "early_stopper is not defined", "'early_stoper'"),
}


@pytest.mark.parametrize(("file", "text", "what", "near"), MISSING.values(), ids=MISSING.keys())
def test_missing_name_is_told_with_the_nearest(tmp_path: Path, file: str, text: str, what: str, near: str) -> None:
    """Every name that a file must define is asked for, with what it may have been called instead."""
    problem = only_problem(tmp_path, **{file: text})
    assert f"{file.replace('__', '/')}.py" in problem.where
    assert what in problem.what
    assert near in problem.what


WRONG = {
    "class in place of dataset": (
        "datasets__a",
        "from ..utils.points import Points\n\ndataset = Points\n",
        "datasets/a.py:3",
        "must be an instance, but is the class Points",
    ),
    "class in place of policy": (
        "loss_weighter",
        "from pipeline.components import UniformLossWeighter\nloss_weighter = UniformLossWeighter\n",
        "loss_weighter.py:2",
        "write UniformLossWeighter(",
    ),
    "number in place of policy": (
        "early_stopper",
        "early_stopper = 3\n",
        "early_stopper.py:1",
        "must have the methods update(",
    ),
    "module of another kind": ("modules__head_a", "module = 3\nsettings = {}\n", "head_a.py:1", "torch.nn.Module"),
    "module class": (
        "modules__head_a",
        "from torch import nn\nmodule = nn.Linear\nsettings = {}\n",
        "head_a.py:2",
        "torch.nn.Module",
    ),
    "settings of another kind": (
        "modules__head_a",
        "from .head_b import module\nsettings = 1\n",
        "head_a.py:2",
        "must be a dict, but is 1",
    ),
    "names as one string": (
        "module_transforms__b",
        "from .a import ModuleTransform\nloss_registers = 'loss_b'\n",
        "b.py:2",
        "list of names, but is 'loss_b'",
    ),
    "collate_fn of another kind": (
        "dataloaders__a",
        LOADERS.replace("{args}", "{'batch_size': 1}") + "collate_fn = 3\n",
        "a.py:3",
        "must be a function",
    ),
    "start epoch of another kind": (
        "optim_sched__heads",
        "from .trunk import create_optimizer, create_scheduler\nscheduler_start_epoch = 0\n",
        "heads.py:2",
        "integer of 1 or more, but is 0",
    ),
}


@pytest.mark.parametrize(("file", "text", "place", "what"), WRONG.values(), ids=WRONG.keys())
def test_wrong_kind_is_told_at_its_line(tmp_path: Path, file: str, text: str, place: str, what: str) -> None:
    """A name with the wrong kind of value is told with file, line and what it must be."""
    _, problems = read(tmp_path, **{file: text})
    assert problems[0].where.endswith(place)
    assert what in problems[0].what


SIGNATURES = {
    "weighter method": (
        "loss_weighter",
        "from pipeline.components import BaseLossWeighter\n\nclass Odd(BaseLossWeighter):\n"
        "    def after_train_step(self):\n        pass\n\nloss_weighter = Odd()\n",
        "after_train_step() must take 1 arg",
    ),
    "stopper method": (
        "early_stopper",
        "from pipeline.components import BaseEarlyStopper\n\nclass Odd(BaseEarlyStopper):\n"
        "    def update(self, losses):\n        pass\n\nearly_stopper = Odd()\n",
        "update(losses) must take 2 arg",
    ),
    "transform": (
        "data_transforms__b",
        "class TrainDataTransform:\n    def __call__(self, point, more):\n        pass\n\n"
        "from .a import EvalDataTransform\n",
        "must take 1 arg",
    ),
    "module transform": (
        "module_transforms__b",
        "loss_registers = ['loss_b', 'error']\n\n"
        "class ModuleTransform:\n    def __init__(self, device):\n        pass\n",
        "ModuleTransform(data_counters, device, logger)",
    ),
    "images": (
        "module_transforms__b",
        "from . import a\n\nloss_registers = ['loss_b', 'error']\n\n"
        "class ModuleTransform(a.ModuleTransform):\n    def images(self, batch):\n        pass\n",
        "images(self, batch, modules)",
    ),
    "tracker": (
        "trackers__mine",
        "from pipeline.components import BaseTracker\n\nclass Odd(BaseTracker):\n"
        "    def publish(self, points, more):\n        pass\n\ntracker = Odd()\n",
        "publish(points, more) must take 1 arg",
    ),
    "optimizer": (
        "optim_sched__heads",
        "from .trunk import create_scheduler\n\ndef create_optimizer():\n    pass\n",
        "must be a function create_optimizer(modules)",
    ),
    "scheduler": (
        "optim_sched__heads",
        "from .trunk import create_optimizer\n\ndef create_scheduler(optimizer, more):\n    pass\n",
        "must be a function create_scheduler(optimizer)",
    ),
}


@pytest.mark.parametrize(("file", "text", "what"), SIGNATURES.values(), ids=SIGNATURES.keys())
def test_wrong_signature_is_told_with_the_expected_one(tmp_path: Path, file: str, text: str, what: str) -> None:
    """A method that could not be called is found before training, with what it must take."""
    problem = only_problem(tmp_path, **{file: text})
    assert f"{file.replace('__', '/')}.py:" in problem.where
    assert what in problem.what


def test_transform_that_needs_arguments_is_told(tmp_path: Path) -> None:
    """Transforms are created by the pipeline, without arguments."""
    text = (
        "class TrainDataTransform:\n    def __init__(self, size):\n        pass\n\nfrom .a import EvalDataTransform\n"
    )
    assert "without arguments" in only_problem(tmp_path, data_transforms__b=text).what


@pytest.mark.parametrize(
    "name", ["shuffle", "sampler", "batch_sampler", "drop_last", "generator", "worker_init_fn", "dataset", "collate_fn"]
)
def test_unsafe_loader_argument_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    """Arguments that would drop, repeat or reorder points are not the author's to set."""
    text = LOADERS.replace("{args}", f"{{'batch_size': 4, '{name}': None}}")
    problem = only_problem(tmp_path, dataloaders__a=text)
    assert problem.where.endswith("dataloaders/a.py:1")
    assert f"[{name!r}] is not allowed: " in problem.what


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ("{'batch_sise': 4, 'batch_size': 4}", "Did you mean 'batch_size'?"),
        ("{'batch_size': 0}", "1 or more, but is 0"),
        ("{'batch_size': 2.0}", "1 or more, but is 2.0"),
        ("{'batch_size': True}", "1 or more, but is True"),
        ("{'batch_size': 4, 'num_workers': -1}", "0 or more, but is -1"),
        ("{'batch_size': 4, 'point_size': 0}", "1 or more, but is 0"),
        ("{'batch_size': 4, 'prefetch_factor': 0}", "1 or more, but is 0"),
        ("[4]", "must be a dict, but is [4]"),
    ],
)
def test_bad_loader_argument_is_told(tmp_path: Path, args: str, what: str) -> None:
    """Misspelt, missing and impossible loader arguments are told with what is allowed."""
    assert what in only_problem(tmp_path, dataloaders__a=LOADERS.replace("{args}", args)).what


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ("{'frosen': True}", "Did you mean 'frozen'?"),
        ("{'load_weights_from_ckp': {'name': 'x'}}", "a dict of ckp_name"),
        ("{'load_weights_from_ckp': 'x.pt'}", "a dict of ckp_name, but it is 'x.pt'"),
        ("{'load_weights_from_ckp': 5}", "a dict of ckp_name, but it is 5"),
        ("{'load_weights_from_ckp': {'ckp_name': 'x', 'module_name': 5}}", "a dict of ckp_name"),
        ("{'load_weights_from_exp': {'exp_name': 'x'}}", "exp_name, ckp_pool_name, module_name"),
        (
            "{'load_weights_from_ckp': {'ckp_name': 'x'}, 'load_weights_from_exp': "
            "{'exp_name': 'x', 'ckp_pool_name': 'best', 'module_name': 'm'}}",
            "has both",
        ),
    ],
)
def test_bad_module_setting_is_told(tmp_path: Path, settings: str, what: str) -> None:
    """Misspelt, half and contradicting module settings are told with what is allowed."""
    assert what in only_problem(tmp_path, modules__head_a=MODULE.replace("{settings}", settings)).what


DUCKS = {
    "pymodules/data_counters/sides.py": """
        import json

        class Sides:
            total = 0

            def count(self, dataset_name, metadata_point):
                self.total += metadata_point["side"]

            def save(self, folder):
                (folder / "total.json").write_text(json.dumps(self.total))

            def load(self, folder):
                self.total = json.loads((folder / "total.json").read_text())

        data_counter = Sides()
        dataset_names = ("a", "b")
    """,
    "pymodules/datasets/b.py": """
        import numpy as np

        class Rows:
            def __getitem__(self, idx):
                return {"x": np.full(6, idx / 10, dtype=np.float32), "y": np.float32(idx)}

            def get_split_idxs(self, split):
                return range(0, 12) if split == "train" else range(12, 16)

            def getitem_metadata(self, idx):
                return {"side": idx % 2}

        dataset = Rows()
    """,
    "pymodules/data_transforms/b.py": """
        def nothing(point):
            return dict(point)

        def TrainDataTransform():
            return nothing

        EvalDataTransform = TrainDataTransform
    """,
    "pymodules/module_transforms/b.py": """
        loss_registers = ["loss_b", "error"]

        class ModuleTransform:
            def __init__(self, counters, device, logger):
                assert counters["sides"].total > 0

            def __call__(self, batch, modules):
                outputs = modules["head_b"](modules["trunk"](modules["stem"](batch["x"])))[:, 0]
                return {"loss_b": (outputs - batch["y"]) ** 2, "error": (outputs - batch["y"]).detach().abs()}
    """,
    "pymodules/optim_sched/heads.py": """
        from torch.optim import SGD

        class Halving:
            def __init__(self, optimizer):
                self.optimizer = optimizer

            def initialize(self, start_epoch):
                assert start_epoch == 1

            def before_train_epoch(self, num_steps):
                pass

            def after_train_step(self, step):
                pass

            def after_train_epoch(self):
                for group in self.optimizer.param_groups:
                    group["lr"] /= 2

            def save(self, folder):
                pass

            def load(self, folder):
                pass

        def create_optimizer(modules):
            params = [*modules["head_a"].parameters(), *modules["head_b"].parameters()]
            return SGD([{"name": "heads", "params": params}], lr=0.02)

        create_scheduler = Halving
    """,
    "pymodules/checkpoint_saver.py": """
        class Saver:
            def update(self, losses, loss_weighter, early_stopper):
                self.epoch = losses["val"]["error"].epochs[-1]

            def save_checkpoints(self):
                return self.epoch == 1

            def save(self, folder):
                pass

            def load(self, folder):
                pass

        checkpoint_saver = Saver()
    """,
    "pymodules/early_stopper.py": """
        class Stopper:
            def update(self, losses, loss_weighter):
                self.epoch = losses["val"]["error"].epochs[-1]

            def improvement(self):
                return self.epoch == 2

            def early_stop(self):
                return self.epoch == 2

            def save(self, folder):
                pass

            def load(self, folder):
                pass

        early_stopper = Stopper()
    """,
    "pymodules/loss_weighter.py": """
        class Weighter:
            calls = 0

            def _count(self, losses):
                type(self).calls += 1

            before_train_epoch = after_train_step = after_train_epoch = _count
            before_eval_epoch = after_eval_epoch = _count

            def get_loss_weight(self, register):
                return 2.0

            def save(self, folder):
                (folder / "calls").write_text(str(self.calls))

            def load(self, folder):
                type(self).calls = int((folder / "calls").read_text())

        loss_weighter = Weighter()
    """,
}


def test_components_that_inherit_from_nothing_work(tmp_path: Path) -> None:
    """Classes that merely follow the contract train, keep pools, and stop when they say so."""
    write_experiment(tmp_path, files=DUCKS)
    progress = run_inside(tmp_path)
    data = tmp_path / "experiment_results/tiny/data"
    assert (progress.is_finished, progress.epoch) == (True, 2)
    assert {path.name for path in (data / "module_ckps").iterdir()} == {"frzn", "init", "last", "best", "epoch_1"}
    assert int((data / "loss_weighter_data/calls").read_text()) > 10


def test_components_that_inherit_from_nothing_resume(tmp_path: Path) -> None:
    """Their state survives like that of any other component."""
    write_experiment(tmp_path, files=DUCKS)
    run_inside(tmp_path, "--stop-after-epoch", "1")
    assert run_inside(tmp_path, "--resume").is_finished


@pytest.mark.parametrize("contract", [name for name in DUCKS if "optim_sched" not in name])
def test_each_contract_alone_is_enough(tmp_path: Path, contract: str) -> None:
    """Each file without base classes is accepted beside those with them."""
    _, problems = read(tmp_path, **{contract[10:-3].replace("/", "__"): DUCKS[contract]})
    assert problems == []
