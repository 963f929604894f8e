"""With ``gradient_reduction: exact`` the number of processes does not change a single bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.store.compare import first_difference, read_any
from tests.support.experiments import FILES, write_experiment
from tests.support.running import environment, run_inside, run_process

DATA = Path("experiment_results/tiny/data")
EXACT = {"gradient_reduction": "exact"}
# Beside BatchNorm and dropout: running values that forward passes replace, used by one dataset only, one of them and
# a weight in another memory order than usual, tied weights, a step whose loss is not finite, and an update that draws.
HARD: dict[str, str | None] = {
    "pymodules/modules/head_b.py": """
        import torch
        from torch import nn


        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
                self.second.weight = self.first.weight
                self.last = nn.Conv2d(2, 1, (2, 2)).to(memory_format=torch.channels_last)
                self.register_buffer("seen", torch.zeros(8))
                self.register_buffer("turned", torch.zeros(2, 2, 2))
                self.register_buffer("num_seen", torch.tensor(0))

            def forward(self, x):
                if self.training:
                    self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
                    self.turned = (0.9 * self.turned + x.detach().mean(0).view(2, 2, 2)).transpose(0, 1)
                    self.num_seen += 1
                hidden = self.second(torch.relu(self.first(x - self.seen - self.turned.reshape(8)))) + x
                return self.last(hidden.view(-1, 2, 2, 2)).view(-1, 1)


        module = Head()
        settings = {}
    """,
    "pymodules/optim_sched/heads.py": FILES["pymodules/optim_sched/heads.py"].replace(
        "from torch.optim import SGD",
        """import torch
        from torch import optim


        class SGD(optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                with torch.no_grad():
                    for weight in self.param_groups[0]["params"]:
                        weight.add_(torch.randn_like(weight), alpha=1e-3)
""",
    ),
    "pymodules/module_transforms/b.py": FILES["pymodules/module_transforms/b.py"]
    + """
            def __call__(self, batch, modules):
                losses = super().__call__(batch, modules)
                if modules["trunk"].training and 7 in batch["idx"].tolist():
                    losses[self.register] = losses[self.register] * float("nan")
                return losses
    """,
}


def run_at(home: Path, nproc: int | None, *words: str) -> None:
    done = run_process(home, *words, nproc=nproc)
    assert done.returncode == 0, done.stdout + done.stderr


def differing(homes: dict[int, Path]) -> dict[int, str | None]:
    first, *others = homes
    return {nproc: first_difference(homes[first] / DATA, homes[nproc] / DATA) for nproc in others}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "world_sizes"),
    [
        ({}, (1, 2, 3, 4, 5)),
        ({"precision": "bf16", "loss_reduction": "sum"}, (1, 3)),
        ({"precision": "fp16", "grad_clip_norm": 0.5}, (1, 5)),
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_one_to_five_processes_give_the_same_bits(
    tmp_path: Path, training: dict[str, Any], world_sizes: tuple[int, ...]
) -> None:
    """Weights, buffers, optimizers, records and pools are those of one process without torchrun, to the bit."""
    homes = {nproc: tmp_path / str(nproc) for nproc in world_sizes}
    for nproc, home in homes.items():
        write_experiment(home, files=HARD, training={**EXACT, **training})
        run_at(home, None if nproc == 1 else nproc)
    assert differing(homes) == dict.fromkeys(world_sizes[1:])
    seen = read_any(homes[1] / DATA / "module_ckps/last/head_b.pt")
    assert seen["num_seen"] > 0
    assert seen["seen"].abs().sum() > 0


def test_two_processes_give_the_bits_of_one(tmp_path: Path) -> None:
    """The same with two processes only, and a run resumed with one of them."""
    homes = {nproc: tmp_path / str(nproc) for nproc in (1, 2)}
    for home in homes.values():
        write_experiment(home, files=HARD, training=EXACT)
    run_inside(homes[1])
    run_at(homes[2], 2, "--stop-after-epoch", "2")
    run_inside(homes[2], "--resume")
    assert differing(homes) == {2: None}


@pytest.mark.slow
def test_fast_gives_other_bits(tmp_path: Path) -> None:
    """Torch's own engine rounds otherwise with two processes: what is compared here can differ."""
    for name in ("alone", "together"):
        write_experiment(tmp_path / name)
    run_inside(tmp_path / "alone")
    run_at(tmp_path / "together", 2)
    assert first_difference(tmp_path / "alone" / DATA, tmp_path / "together" / DATA) is not None


@pytest.mark.slow
def test_log_says_that_bits_stay_the_same(tmp_path: Path) -> None:
    """Resumed with another number of processes, an exact run promises the same bits and keeps its threads."""
    write_experiment(tmp_path, training=EXACT)
    run_at(tmp_path, None, "--stop-after-epoch", "1")
    done = run_process(tmp_path, "--resume", nproc=2, env={"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    assert "world_size 1 → 2, backend none → gloo. This does not change any bits" in done.stdout
    assert "resume: bit-exact with any number of processes × 1 thread" in done.stdout
    assert "bits may differ" not in done.stdout


def test_threads_are_a_setting(tmp_path: Path) -> None:
    """The number of threads in the settings wins over the environment's, and is recorded."""
    write_experiment(tmp_path, training={"threads": 2})
    before = torch.get_num_threads()
    try:
        run_inside(tmp_path, "--stop-after-epoch", "0")
    finally:
        torch.set_num_threads(before)
    start = json.loads((tmp_path / "experiment_results/tiny/starts.jsonl").read_text().splitlines()[0])
    assert start["threads"] == 2


def test_sparse_gradients_are_refused(tmp_path: Path) -> None:
    """Gradients that list only some rows have no place in the tree; the layer itself does not show that it has them."""
    embedding = """
        import torch
        from torch import nn


        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Parameter(torch.ones(3, 8))

            def forward(self, x):
                rows = nn.functional.embedding(torch.zeros(len(x), dtype=torch.long), self.table, sparse=True)
                return (x * rows).sum(1, keepdim=True)


        module = Head()
        settings = {}
    """
    write_experiment(tmp_path, files={"pymodules/modules/head_a.py": embedding}, training=EXACT)
    done = run_process(tmp_path)
    assert done.returncode == 1
    assert "fix: create its embedding with sparse=False." in done.stderr


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_sums_in_many_buckets_are_those_of_one_process(nproc: int) -> None:
    """Tensors cut into pieces, tensors that batches lack, ranks without a batch: to the bit and the sign of zero."""
    line = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", "-m", "tests.support.summing"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_sparse_gradients_of_two_processes_are_refused_at_the_start(tmp_path: Path) -> None:
    """The number of processes reaches the checks; torch itself would end with an internal error."""
    embedding = """
        import torch
        from torch import nn


        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(3, 8, sparse=True)

            def forward(self, x):
                return (x * self.table(torch.zeros(len(x), dtype=torch.long))).sum(1, keepdim=True)


        module = Head()
        settings = {}
    """
    write_experiment(tmp_path, files={"pymodules/modules/head_a.py": embedding})
    done = run_process(tmp_path, nproc=2)
    assert "must have dense gradients with 2 processes" in done.stderr
