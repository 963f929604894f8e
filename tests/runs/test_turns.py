"""Turns and cadence: optimizers that follow registers of their own, in turn or together, also over kills."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.errors import PipelineError
from pipeline.store.compare import first_difference, read_any
from tests.crash.campaign import live
from tests.runs.test_workloads import Losses, check_losses, plain, write
from tests.support.running import run_inside, run_process
from tests.support.verbs import call

RESULTS = Path("experiment_results/tiny")
DATA = RESULTS / "data"
REGISTERS = ["d_loss", "g_loss"]
SHARED = {"turns": [["discriminator"], ["generator"]], "share_batches": True}
OPTIMIZER = """
    from torch.optim import Adam

    loss_registers = ["{register}"]


    def create_optimizer(modules):
        return Adam(modules["{name}"].parameters(), lr=0.01, betas=(0.5, 0.9))
"""
GAN = {
    "pymodules/datasets/points.py": """
        import torch

        from pipeline.components import BaseDataset


        class Points(BaseDataset):
            def __getitem__(self, idx):
                generator = torch.Generator().manual_seed(idx)
                return {"real": torch.randn(2, generator=generator) + 2, "noise": torch.randn(3, generator=generator)}

            def get_split_idxs(self, split):
                return range(36) if split == "train" else range(36, 44)


        dataset = Points()
    """,
    "pymodules/dataloaders/points.py": 'train_dataloader_args = {"batch_size": 4}\n',
    "pymodules/modules/generator.py": """
        from torch import nn

        module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    """,
    "pymodules/modules/discriminator.py": """
        from torch import nn

        module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    """,
    "pymodules/module_transforms/points.py": """
        import torch.nn.functional as F

        from pipeline.components import BaseModuleTransform

        loss_registers = ["d_loss", "g_loss"]


        class ModuleTransform(BaseModuleTransform):
            def __call__(self, batch, modules):
                judge = modules["discriminator"]
                fake = modules["generator"](batch["noise"])
                real_score, fake_score = judge(batch["real"])[:, 0], judge(fake)[:, 0]
                return {
                    "d_loss": F.softplus(-real_score) + F.softplus(judge(fake.detach())[:, 0]),
                    "g_loss": F.softplus(-fake_score),
                }
    """,
    "pymodules/optim_sched/discriminator.py": OPTIMIZER.format(register="d_loss", name="discriminator"),
    "pymodules/optim_sched/generator.py": OPTIMIZER.format(register="g_loss", name="generator"),
}


def write_gan(home: Path, **training: Any) -> Path:
    write(home, GAN, REGISTERS, data_loading={"step_min_items": 8}, training=training)
    return home


def mean_losses(modules: dict[str, nn.Module], batches: list[Any]) -> dict[str, torch.Tensor]:
    """Return the means of both losses over the batches of a step, as plain torch computes them."""
    generator, judge = modules["generator"], modules["discriminator"]
    d_losses, g_losses = [], []
    for batch in batches:
        fake = generator(batch["noise"])
        d_losses.append(F.softplus(-judge(batch["real"])[:, 0]) + F.softplus(judge(fake.detach())[:, 0]))
        g_losses.append(F.softplus(-judge(fake)[:, 0]))
    return {"d_loss": torch.cat(d_losses).mean(), "g_loss": torch.cat(g_losses).mean()}


def train_by_hand(home: Path, *, shares: bool) -> list[Losses]:
    """Train D, then G with the updated D on the same batches, as the original DCGAN; or both in one step."""
    given = plain(home)
    optimizers = {
        name: torch.optim.Adam(module.parameters(), lr=0.01, betas=(0.5, 0.9)) for name, module in given.modules.items()
    }

    def set_gradients(name: str, mean: torch.Tensor) -> None:
        weights = list(given.modules[name].parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(mean, weights, retain_graph=True), strict=True):
            weight.grad = gradient

    losses = []
    for batches in given.steps:
        means = mean_losses(given.modules, batches)
        set_gradients("discriminator", means["d_loss"])
        if shares:
            optimizers["discriminator"].step()
            means["g_loss"] = mean_losses(given.modules, batches)["g_loss"]
            set_gradients("generator", means["g_loss"])
        else:
            set_gradients("generator", means["g_loss"])
            optimizers["discriminator"].step()
        optimizers["generator"].step()
        losses.append({name: float(mean.detach()) for name, mean in means.items()})
    return losses


def test_generator_meets_the_updated_discriminator(tmp_path: Path) -> None:
    """The order of the original DCGAN: D, then G on the same batches with the new D; every step has the same losses."""
    run_inside(write_gan(tmp_path, **SHARED))
    check_losses(tmp_path, train_by_hand(tmp_path, shares=True))


def test_each_optimizer_follows_its_own_registers(tmp_path: Path) -> None:
    """In one step without turns, the loss of one network leaves no gradient in the other."""
    run_inside(write_gan(tmp_path))
    check_losses(tmp_path, train_by_hand(tmp_path, shares=False))


SAM = {
    **{file: text for file, text in GAN.items() if "optim_sched" not in file},
    "pymodules/optim_sched/main.py": """
        from torch.optim import SGD

        from pipeline.components import sharpness_aware


        def create_optimizer(modules):
            weights = [weight for module in modules.values() for weight in module.parameters()]
            return sharpness_aware(SGD, weights, rho=0.1, lr=0.1, momentum=0.9)
    """,
}
# That of a return statement in the transform of the experiment.
_INDENT = " " * 16
SAM_TURNS = {"turns": [["main"], ["main"]], "share_batches": True}


def test_sharpness_aware_steps_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """SAM: up the gradient, the gradient there, back, and the step of the optimizer around which it is."""
    write(tmp_path, SAM, REGISTERS, data_loading={"step_min_items": 8}, training=SAM_TURNS)
    run_inside(tmp_path)
    given = plain(tmp_path)
    weights = [weight for module in given.modules.values() for weight in module.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    losses = []
    for batches in given.steps:
        means = mean_losses(given.modules, batches)
        gradients = torch.autograd.grad(means["d_loss"] + means["g_loss"], weights)
        norm = torch.sqrt(sum((gradient.square().sum() for gradient in gradients), torch.zeros(())))
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight += 0.1 * gradient / norm
        there = mean_losses(given.modules, batches)
        for weight, gradient in zip(
            weights, torch.autograd.grad(there["d_loss"] + there["g_loss"], weights), strict=True
        ):
            weight.grad = gradient
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
        optimizer.step()
        losses.append({name: float(mean.detach()) for name, mean in means.items()})
    check_losses(tmp_path, losses)


@pytest.mark.parametrize("turn", [0, 1])
def test_turn_that_is_skipped_leaves_no_trace_of_the_other(tmp_path: Path, turn: int) -> None:
    """A NaN in the first turn of SAM leaves a plain step, one in the second leaves the weights where they were."""
    count = 'self.calls = getattr(self, "calls", -1) + 1'
    spoil = f'broken = float("nan") if self.calls == {turn} else 1.0'
    transform = SAM["pymodules/module_transforms/points.py"].replace('"g_loss": F', '"g_loss": broken * F')
    transform = transform.replace("return {", f"{count}\n{_INDENT}{spoil}\n{_INDENT}return {{")
    files = {**SAM, "pymodules/module_transforms/points.py": transform}
    write(tmp_path, files, REGISTERS, data_loading={"step_min_items": 36}, training={**SAM_TURNS, "max_epochs": 1})
    loaders = tmp_path / "experiment_settings/tiny/pymodules/dataloaders/points.py"
    loaders.write_text('train_dataloader_args = {"batch_size": 36}\n')
    run_inside(tmp_path, "--no-validate")
    pools = tmp_path / DATA / "module_ckps"
    initial, last = (read_any(pools / pool / "discriminator.pt") for pool in ("init", "last"))
    has_moved = any(not torch.equal(initial[name], last[name]) for name in initial)
    assert has_moved == (turn == 0)


def adam_steps(home: Path, *names: str) -> dict[str, int]:
    """Return how many updates each optimizer has applied."""
    names = names or ("discriminator", "generator")
    states = {name: read_any(home / DATA / f"optim_ckps/{name}.pt") for name in names}
    return {name: int(state["state"][0]["step"]) for name, state in states.items()}


def test_optimizers_act_in_their_turns_only(tmp_path: Path) -> None:
    """Ten steps, D twice for each G: 7 and 3 updates; the other's moments do not move."""
    run_inside(write_gan(tmp_path, turns=[["discriminator"], ["discriminator"], ["generator"]]))
    assert adam_steps(tmp_path) == {"discriminator": 7, "generator": 3}


def test_transform_may_leave_out_what_nobody_follows_in_a_turn(tmp_path: Path) -> None:
    """self.position.turn says whose turn it is: the losses are the same, though each turn computes one of them only."""
    transform = GAN["pymodules/module_transforms/points.py"]
    chosen = "\n".join(
        [
            transform.replace("return {", "results = {").rstrip(),
            f"{_INDENT}if not judge.training:",
            f"{_INDENT}    return results",
            f"{_INDENT}name = ['d_loss', 'g_loss'][self.position.turn]",
            f"{_INDENT}return {{name: results[name]}}",
            "",
        ]
    )
    write(
        tmp_path,
        {**GAN, "pymodules/module_transforms/points.py": chosen},
        REGISTERS,
        data_loading={"step_min_items": 8},
        training=SHARED,
    )
    assert call(tmp_path, "check", "tiny") == 0
    run_inside(tmp_path)
    check_losses(tmp_path, train_by_hand(tmp_path, shares=True))


def test_turn_that_is_skipped_alone_takes_its_register_out_of_the_step(tmp_path: Path) -> None:
    """G's NaN in every step leaves D's updates and losses, and ends the run once there are too many in a row."""
    transform = GAN["pymodules/module_transforms/points.py"].replace('"g_loss": F', '"g_loss": float("nan") * F')
    write(
        tmp_path,
        {**GAN, "pymodules/module_transforms/points.py": transform},
        REGISTERS,
        data_loading={"step_min_items": 8},
        training={**SHARED, "max_consecutive_nan_steps": 7},
    )
    with pytest.raises(PipelineError, match="8 steps in a row"):
        run_inside(tmp_path, "--no-validate")
    steps = {
        name: read_any(tmp_path / DATA / f"loss_reg_data/train/{name}/step_data_1.npz") for name in ("d_loss", "g_loss")
    }
    assert np.isfinite(steps["d_loss"]["means"]).all()
    assert (steps["g_loss"]["items"] == 0).all()
    assert not steps["d_loss"]["skipped"].any()
    assert adam_steps(tmp_path, "discriminator")["discriminator"] >= 5


FALLING = """
    from torch.optim import SGD
    from torch.optim.lr_scheduler import ExponentialLR

    from pipeline.components import TorchScheduler, sharpness_aware

    {follows}


    def create_optimizer(modules):
        weights = [weight for name in {names} for weight in modules[name].parameters()]
        return {optimizer}


    def create_scheduler(optimizer):
        return TorchScheduler(ExponentialLR(optimizer, 0.5), per="step")
"""


def last_rate(home: Path, files: dict[str, str], **training: Any) -> dict[str, float]:
    """Train one epoch of three steps; return the rates that follow it, of optimizers that began at 1."""
    others = {file: text for file, text in GAN.items() if "optim_sched" not in file}
    files = {f"pymodules/optim_sched/{name}.py": text for name, text in files.items()}
    write(home, {**others, **files}, REGISTERS, data_loading={"step_min_items": 12}, training=training)
    run_inside(home)
    paths = {Path(file).stem: home / DATA / f"optim_ckps/{Path(file).stem}.pt" for file in files}
    return {name: read_any(path)["param_groups"][0]["lr"] for name, path in paths.items()}


def test_scheduler_follows_the_updates_of_its_own_optimizer(tmp_path: Path) -> None:
    """D acts in two of three steps and G in one, and their rates fall as often; that of SAM falls once per step."""
    plain = "SGD(weights, lr=1.0)"
    files = {
        name: FALLING.format(follows=f'loss_registers = ["{name[0]}_loss"]', names=[name], optimizer=plain)
        for name in ("discriminator", "generator")
    }
    turns = [["discriminator"], ["discriminator"], ["generator"]]
    rates = last_rate(tmp_path / "gan", files, turns=turns, max_epochs=1)
    assert rates == {"discriminator": 0.5**2, "generator": 0.5}
    sam = "sharpness_aware(SGD, weights, lr=1.0)"
    both = FALLING.format(follows="", names=["discriminator", "generator"], optimizer=sam)
    assert last_rate(tmp_path / "sam", {"main": both}, **SAM_TURNS, max_epochs=1) == {"main": 0.5**3}


def with_cadence(name: str, every_steps: int) -> str:
    """Return the file of an optimizer that acts in every so many steps."""
    return f"\n    every_steps = {every_steps}{GAN[f'pymodules/optim_sched/{name}.py']}"


MISTAKES = {
    "unknown optimizer": ({"turns": [["generator"], ["discriminater"]]}, {}, "Did you mean 'discriminator'?"),
    "no turn": ({"turns": [["generator"]]}, {}, "'discriminator' has no turn"),
    "nothing to share": ({"share_batches": True}, {}, "needs turns"),
    "not followed": (
        {},
        {"pymodules/optim_sched/generator.py": GAN["pymodules/optim_sched/generator.py"].replace("g_loss", "d_loss")},
        "'g_loss' is optimised, but no optimizer follows it",
    ),
    "unknown register": (
        {},
        {"pymodules/optim_sched/generator.py": GAN["pymodules/optim_sched/generator.py"].replace("g_loss", "gloss")},
        "loss_registers has 'gloss', which is not optimised",
    ),
    "never": (
        {"turns": [["discriminator"], ["generator"]]},
        {
            "pymodules/optim_sched/discriminator.py": "\n    every_steps = 2"
            + GAN["pymodules/optim_sched/discriminator.py"]
        },
        "'discriminator' would never act",
    ),
    "no step": (
        {},
        {"pymodules/optim_sched/generator.py": with_cadence("generator", 0)},
        "every_steps must be an integer of 1 or more, but is 0",
    ),
    "shards": ({"parallelism": "fsdp"}, {}, '"fsdp" does not go together with loss_registers'),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence_and_leave_the_disk_alone(tmp_path: Path, mistake: str) -> None:
    """Turns and registers that do not match are refused before anything is written."""
    training, files, expected = MISTAKES[mistake]
    write(tmp_path, {**GAN, **files}, REGISTERS, data_loading={"step_min_items": 8}, training=training)
    done = run_process(tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert not (tmp_path / "experiment_results").exists()


CADENCES: dict[str, dict[str, Any]] = {
    "shared": SHARED,
    "in turn": {"turns": [["discriminator"], ["discriminator"], ["generator"]]},
}


@pytest.mark.slow
@pytest.mark.parametrize("cadence", CADENCES)
@pytest.mark.parametrize("engine", ["fast", "exact"])
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, cadence: str, engine: str) -> None:
    """Killed at two processes inside turns and commits, a run ends like one that was left alone."""
    training = {**CADENCES[cadence], "gradient_reduction": engine, "checkpoint_every_steps": 2}
    undisturbed, killed = (write_gan(tmp_path / name, **training) for name in ("undisturbed", "killed"))
    assert run_process(undisturbed, nproc=2).returncode == 0
    draw = random.Random(5)
    lives = [live(killed, 2, aim, draw) for aim in ("random", "write", "random")]
    assert any(life.was_killed for life in lives)
    assert run_process(killed, "--auto", nproc=2).returncode == 0
    assert first_difference(undisturbed / DATA, killed / DATA) is None


@pytest.mark.slow
def test_exact_gives_the_same_bits_on_one_to_five_processes(tmp_path: Path) -> None:
    """Turns follow from the step, so nothing about them depends on the processes."""
    homes = {nproc: write_gan(tmp_path / str(nproc), **SHARED, gradient_reduction="exact") for nproc in (1, 2, 3, 5)}
    for nproc, home in homes.items():
        done = run_process(home, nproc=None if nproc == 1 else nproc)
        assert done.returncode == 0, done.stderr
    differences = {nproc: first_difference(homes[1] / DATA, home / DATA) for nproc, home in homes.items()}
    assert differences == dict.fromkeys(homes)
