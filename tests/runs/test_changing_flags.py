"""Parameters may be frozen and unfrozen during training, at any number of processes and over kills."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.store.compare import first_difference, read_any
from tests.support.experiments import FILES, write_experiment
from tests.support.running import run_process

DATA = Path("experiment_results/tiny/data")
# head_b is frozen until the second epoch, the trunk's first layer until a step within it; then head_a is frozen.
# None of it is said again after a resume. A run with KILL_AT=EPOCH,STEP is killed after that step.
FILES_THAT_CHANGE_FLAGS: dict[str, str | None] = {
    "pymodules/modules/trunk.py": FILES["pymodules/modules/trunk.py"].replace(
        "settings =", "module[0].requires_grad_(False)\n        settings ="
    ),
    "pymodules/modules/head_b.py": """
        from torch import nn

        module = nn.Linear(8, 1).requires_grad_(False)
        settings = {}
    """,
    "pymodules/optim_sched/heads.py": """
        import os
        import signal

        from torch.optim import SGD

        from pipeline.components import BaseScheduler
        from pipeline.components.stateful import load_json, save_json

        from ..modules import head_a, head_b, trunk


        class Unfreezing(BaseScheduler):
            epoch = 0

            def before_train_epoch(self, num_steps):
                self.epoch += 1
                if self.epoch == 2:
                    head_b.module.requires_grad_(True)

            def after_train_step(self, step):
                if (self.epoch, step) == (2, 2):
                    trunk.module[0].requires_grad_(True)
                if (self.epoch, step) == (2, 3):
                    head_a.module.requires_grad_(False)
                if os.environ.get("KILL_AT") == f"{self.epoch},{step}":
                    os.kill(os.getpid(), signal.SIGKILL)

            def save(self, folder):
                save_json(folder, {"epoch": self.epoch})

            def load(self, folder):
                self.epoch = load_json(folder)["epoch"]


        def create_optimizer(modules):
            params = [*modules["head_a"].parameters(), *modules["head_b"].parameters()]
            return SGD([{"name": "heads", "params": params}], lr=0.02, momentum=0.9)


        def create_scheduler(optimizer):
            return Unfreezing()
    """,
}


def run_at(home: Path, nproc: int, *words: str, env: dict[str, str] | None = None) -> None:
    done = run_process(home, *words, nproc=nproc if nproc > 1 else None, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def weights(home: Path, module: str, pool: str = "last") -> torch.Tensor:
    pools = home / DATA / "module_ckps"
    constant = pools / f"constant/{module}.pt"
    state = (read_any(constant) if constant.exists() else {}) | read_any(pools / f"{pool}/{module}.pt")
    return torch.cat([one.double().reshape(-1) for one in state.values()])


@pytest.mark.parametrize(
    ("nproc", "reduction", "kill_at"),
    [
        (1, "fast", "2,4"),
        pytest.param(2, "fast", "2,3", marks=pytest.mark.slow),
        pytest.param(3, "fast", "2,3", marks=pytest.mark.slow),
        pytest.param(4, "fast", "2,3", marks=pytest.mark.slow),
        pytest.param(1, "exact", "2,5", marks=pytest.mark.slow),
        pytest.param(2, "exact", "2,3", marks=pytest.mark.slow),
        pytest.param(3, "exact", "2,4", marks=pytest.mark.slow),
    ],
)
def test_changed_flags_survive_a_kill(tmp_path: Path, nproc: int, reduction: str, kill_at: str) -> None:
    """Killed within the epoch in which flags change, a run ends with the bytes of one that was never killed.

    A kill after step 3 resumes at the commit of step 2, right after the trunk was unfrozen: its gradients
    are then reduced for the first time.
    """
    homes = {name: tmp_path / name for name in ("whole", "killed")}
    # Commits are complete when the next step begins, so that it is known which one is resumed.
    training = {"gradient_reduction": reduction, "checkpoint_in_background": False}
    for home in homes.values():
        write_experiment(home, files=FILES_THAT_CHANGE_FLAGS, training=training)
    run_at(homes["whole"], nproc)
    killed = run_process(homes["killed"], nproc=nproc if nproc > 1 else None, env={"KILL_AT": kill_at})
    assert killed.returncode != 0
    done = run_process(homes["killed"], "--resume", nproc=nproc if nproc > 1 else None)
    assert done.returncode == 0, done.stderr
    epoch, step = map(int, kill_at.split(","))
    assert f"continues at epoch {epoch}, training, step {(step - 1) // 2 * 2}" in done.stdout
    assert first_difference(homes["whole"] / DATA, homes["killed"] / DATA) is None
    for file in ("heads.pt", "trunk.pt"):
        whole, resumed = ((home / DATA / "optim_ckps" / file).read_bytes() for home in homes.values())
        assert whole == resumed, f"{file} has the same values, but other bytes"
    for module in ("trunk", "head_a", "head_b"):
        assert not torch.equal(weights(homes["whole"], module), weights(homes["whole"], module, "init"))


@pytest.mark.slow
def test_unfrozen_weights_are_reduced_over_processes(tmp_path: Path) -> None:
    """Two processes train unfrozen weights as one does: up to rounding, and with exact to the bit."""
    for name, reduction in (("alone", "exact"), ("exact", "exact"), ("fast", "fast")):
        write_experiment(tmp_path / name, files=FILES_THAT_CHANGE_FLAGS, training={"gradient_reduction": reduction})
        run_at(tmp_path / name, 1 if name == "alone" else 2)
    assert first_difference(tmp_path / "alone" / DATA, tmp_path / "exact" / DATA) is None
    for module in ("trunk", "head_a", "head_b"):
        torch.testing.assert_close(
            weights(tmp_path / "fast", module), weights(tmp_path / "alone", module), rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [3, 4])
def test_exact_bits_do_not_depend_on_processes_while_flags_change(tmp_path: Path, nproc: int) -> None:
    """Three and four processes give the bits of one, in the steps in which flags change too."""
    for name in ("alone", "together"):
        write_experiment(tmp_path / name, files=FILES_THAT_CHANGE_FLAGS, training={"gradient_reduction": "exact"})
        run_at(tmp_path / name, 1 if name == "alone" else nproc)
    assert first_difference(tmp_path / "alone" / DATA, tmp_path / "together" / DATA) is None


@pytest.mark.slow
def test_sharded_weights_may_be_unfrozen(tmp_path: Path) -> None:
    """With fsdp, unfrozen weights are trained as with ddp, up to rounding, also by a run that was killed meanwhile."""
    write_experiment(tmp_path, "whole", files=FILES_THAT_CHANGE_FLAGS)
    assert run_process(tmp_path, name="whole").returncode == 0
    write_experiment(
        tmp_path, files=FILES_THAT_CHANGE_FLAGS, training={"parallelism": "fsdp", "checkpoint_in_background": False}
    )
    assert run_process(tmp_path, nproc=2, env={"KILL_AT": "2,3"}).returncode != 0
    run_at(tmp_path, 2, "--resume")
    for module in ("trunk", "head_a", "head_b"):
        sharded = read_any(tmp_path / DATA / "module_ckps/last" / module)
        whole = read_any(tmp_path / "experiment_results/whole/data/module_ckps/last" / f"{module}.pt")
        for name, expected in whole.items():
            torch.testing.assert_close(sharded[name], expected, rtol=1e-4, atol=1e-5)


def test_unfrozen_weight_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    """A parameter that nobody updates must not require a gradient; the message names it."""
    files = {
        **FILES_THAT_CHANGE_FLAGS,
        "pymodules/optim_sched/heads.py": str(FILES_THAT_CHANGE_FLAGS["pymodules/optim_sched/heads.py"]).replace(
            ', *modules["head_b"].parameters()', ""
        ),
    }
    write_experiment(tmp_path, files=files)
    done = run_process(tmp_path)
    assert done.returncode == 1
    assert "must be in an optimizer, but head_b.weight, head_b.bias require one" in done.stderr


def branch_transforms(switches: str) -> dict[str, str | None]:
    """Return module transforms that switch flags in their forward passes, each for the head of its own dataset."""
    return {
        "pymodules/module_transforms/a.py": FILES["pymodules/module_transforms/a.py"].replace(
            "outputs =", f"{switches}\n                outputs ="
        )
    }


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_flags_that_a_batch_switches_off_are_on_again(tmp_path: Path, nproc: int) -> None:
    """Other processes run other batches, so that flags of a forward pass end with it: the bits are those without."""
    switches = """for name in ("head_a", "head_b"):
                    modules[name].requires_grad_(name == self.head)"""
    write_experiment(tmp_path / "plain")
    write_experiment(tmp_path / "switched", files=branch_transforms(switches))
    for name in ("plain", "switched"):
        run_at(tmp_path / name, nproc, "--stop-after-epoch", "1")
    assert first_difference(tmp_path / "plain" / DATA, tmp_path / "switched" / DATA) is None


def test_flag_that_a_batch_switches_on_is_refused(tmp_path: Path) -> None:
    """A gradient that no other process knows of would never be reduced; the message names the weight."""
    files = branch_transforms('modules["head_b"].requires_grad_(True)')
    files["pymodules/modules/head_b.py"] = FILES_THAT_CHANGE_FLAGS["pymodules/modules/head_b.py"]
    write_experiment(tmp_path, files=files)
    done = run_process(tmp_path)
    assert done.returncode == 1
    assert "must not be switched on by a batch, but it was for head_b.weight, head_b.bias" in done.stderr


def test_edited_copy_may_freeze_and_unfreeze(tmp_path: Path) -> None:
    """What an accepted edit builds differently wins over the committed flags; all else is as it was committed."""
    write_experiment(tmp_path, files=FILES_THAT_CHANGE_FLAGS)
    run_at(tmp_path, 1, "--stop-after-epoch", "2")
    copy = tmp_path / "experiment_results/tiny/pymodules/modules/trunk.py"
    copy.write_text(copy.read_text() + "module[1].requires_grad_(False)\n")
    run_at(tmp_path, 1, "--resume", "--accept-edited-copy")
    before, after = (read_any(tmp_path / DATA / f"module_ckps/{pool}/trunk.pt") for pool in ("epoch_2", "last"))
    assert torch.equal(before["1.weight"], after["1.weight"]), "frozen by the edit"
    assert not torch.equal(before["0.weight"], after["0.weight"]), "still unfrozen, as committed"


IDLE_OPTIMIZER: dict[str, str | None] = {
    "pymodules/modules/idle.py": """
        import torch
        from torch import nn

        module = nn.Linear(2, 2)
        module.register_buffer("num_updates", torch.zeros(()))
        settings = {}
    """,
    "pymodules/optim_sched/idle.py": """
        from torch.optim import SGD

        from pipeline.components import BaseScheduler


        def create_optimizer(modules):
            optimizer = SGD([{"name": "idle", "params": modules["idle"].parameters()}], lr=0.1)
            optimizer.register_step_post_hook(lambda *arguments: modules["idle"].num_updates.add_(1))
            return optimizer


        def create_scheduler(optimizer):
            return BaseScheduler()
    """,
}


@pytest.mark.parametrize(
    ("nproc", "training"),
    [
        (1, {}),
        (2, {}),
        pytest.param(2, {"gradient_reduction": "exact"}, marks=pytest.mark.slow),
        pytest.param(2, {"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param(3, {"precision": "fp16", "gradient_reduction": "exact"}, marks=pytest.mark.slow),
    ],
)
def test_optimizer_without_gradients_does_not_step(tmp_path: Path, nproc: int, training: dict[str, str]) -> None:
    """An optimizer none of whose weights was used is left alone at any number of processes, and so are its hooks."""
    write_experiment(tmp_path, files=IDLE_OPTIMIZER, training=training)
    run_at(tmp_path, nproc, "--stop-after-epoch", "1")
    assert read_any(tmp_path / DATA / "module_ckps/last/idle.pt")["num_updates"] == 0
