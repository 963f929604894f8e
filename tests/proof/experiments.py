"""Experiments whose steps are counted on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from tests.support.experiments import write_experiment

NUM_BATCHNORMS = 53
DEEP = f"""
from torch import nn

layers = []
for number in range({NUM_BATCHNORMS}):
    layers += [nn.Conv2d(1 if number == 0 else 4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))
"""


def deep_model() -> nn.Module:
    """Return the module that the experiment trains."""
    names: dict[str, Any] = {}
    exec(DEEP, names)
    module: nn.Module = names["module"]
    return module


_LEFT_OUT = (
    "datasets/b",
    "data_transforms/b",
    "dataloaders/b",
    "module_transforms/b",
    "modules/head_a",
    "modules/head_b",
    "optim_sched/heads",
)


def write_deep(home: Path, name: str = "deep", module: str = DEEP, **settings: Any) -> Path:
    """Write an experiment with one dataset and one module, by default as many BatchNorm layers as a ResNet-50 has."""
    files: dict[str, str | None] = {f"pymodules/{path}.py": None for path in _LEFT_OUT}
    files |= {
        "pymodules/data_counters/sides.py": """
            from pipeline.components import CategoryCounter

            data_counter = CategoryCounter("side", 2)
            dataset_names = ["a"]
        """,
        "pymodules/modules/trunk.py": f"{module}\nsettings = {{}}\n",
        "pymodules/module_transforms/a.py": """
            from pipeline.components import BaseModuleTransform

            loss_registers = ["loss_a", "error"]


            class ModuleTransform(BaseModuleTransform):
                def __call__(self, batch, modules):
                    images = batch["x"][:, None, None, :].expand(-1, 1, 6, 6)
                    difference = modules["trunk"](images)[:, 0] - batch["y"]
                    return {"loss_a": difference**2, "error": difference.detach().abs()}
        """,
        "pymodules/optim_sched/trunk.py": """
            from torch.optim import SGD

            from pipeline.components import BaseScheduler


            def create_optimizer(modules):
                return SGD([{"name": "trunk", "params": modules["trunk"].parameters()}], lr=0.001, momentum=0.9)


            def create_scheduler(optimizer):
                return BaseScheduler()
        """,
        "pymodules/loss_weighter.py": """
            from pipeline.components import UniformLossWeighter

            loss_weighter = UniformLossWeighter()
        """,
    }
    registers = {"loss_registers": ["loss_a", {"name": "error", "optimize": False}]}
    return write_experiment(home, name, files, **{"loss_registers": registers, **settings})
