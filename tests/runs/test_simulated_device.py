"""Real runs on a simulated accelerator, which keeps its tensors apart, executes late and counts.

Everything is compared with the same run on the CPU: the device computes with the CPU's kernels, so that each byte
must be the same. A wait that is missing anywhere leaves garbage in what is committed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proof.experiments import write_deep
from tests.support.experiments import tree, write_experiment
from tests.support.running import BackgroundRun, environment, run_process

ROOT = Path(__file__).parents[2]
SIMULATED = {"PYTHONPATH": str(ROOT / "tests" / "support" / "simulated" / "site")}


def data_of(home: Path, name: str = "tiny") -> dict[str, bytes]:
    return {path: content for path, (content, _) in tree(home / "experiment_results" / name / "data").items()}


def finished(home: Path, *words: str, nproc: int | None = None, simulated: bool = True, name: str = "tiny") -> str:
    """Run to the end and return what was printed."""
    done = run_process(home, *words, nproc=nproc, env=SIMULATED if simulated else None, name=name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" on {'sim' if simulated else 'cpu'}" in done.stdout
    return done.stdout


def on_both(tmp_path: Path, *words: str, nproc: int | None = None, **settings: object) -> tuple[Path, Path]:
    """Run the tiny experiment on the simulated device and on the CPU; return both data homes."""
    homes = tmp_path / "sim", tmp_path / "cpu"
    for home in homes:
        write_experiment(home, **settings)
        finished(home, *words, nproc=nproc, simulated=home.name == "sim")
    return homes


def counted(*words: str) -> list[dict[str, int]]:
    """Return the counts of the steps of a run, or of a loop written by hand, on the simulated device."""
    line = [sys.executable, "-m", "tests.proof.counting", *words]
    done = subprocess.run(line, cwd=ROOT, env=environment(SIMULATED), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return steps


def steps_of(home: Path, name: str) -> list[dict[str, int]]:
    """Train one epoch on the simulated device and return the counts of its steps."""
    return counted(name, "--data-home", str(home), "--stop-after-epoch", "1")


def test_device_behaves_like_an_accelerator() -> None:
    """Late execution, garbage before a wait, tensors apart, no use after a fork, counts: the device's own checks."""
    line = [sys.executable, "-m", "tests.support.simulated.self_check"]
    done = subprocess.run(line, cwd=ROOT, env=environment(SIMULATED), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_run_has_the_bits_of_the_cpu(tmp_path: Path) -> None:
    """BatchNorm, dropout, a frozen module, clipping, pinned batches, commits in the background, evaluation."""
    sim, cpu = on_both(tmp_path)
    assert data_of(sim) == data_of(cpu)


def test_files_of_foreground_commits_name_no_device(tmp_path: Path) -> None:
    """A machine without the device reads them with plain torch.load."""
    sim, cpu = on_both(tmp_path, "--stop-after-epoch", "1", training={"checkpoint_in_background": False})
    assert data_of(sim) == data_of(cpu)


def test_cpu_can_be_asked_for_beside_an_accelerator(tmp_path: Path) -> None:
    """The first block says why the run is not on the accelerator."""
    write_experiment(tmp_path)
    done = run_process(tmp_path, "--stop-after-epoch", "0", "--device", "cpu", env=SIMULATED)
    assert done.returncode == 0, done.stderr
    assert "processes: 1 on cpu (--device cpu)" in done.stdout


@pytest.mark.parametrize("step_min_items", [4, 16], ids=["one batch", "four batches"])
def test_step_adds_few_kernels_and_waits_once(tmp_path: Path, step_min_items: int) -> None:
    """A model with as many BatchNorm layers as a ResNet-50: a tenth more kernels at most, one wait of the host."""
    settings = {"data_loading": {"step_min_items": step_min_items}, "logging": {"text": {"every_steps": 1000}}}
    write_deep(tmp_path, **settings, training={"checkpoint_every_steps": None})
    steps = steps_of(tmp_path, "deep")
    assert {step["waits"] for step in steps} == {1}
    by_hand = counted("--by-hand", str(step_min_items // 4))
    assert max(step["kernels"] for step in steps[1:]) <= 1.1 * by_hand[-1]["kernels"]


def test_number_of_buffers_and_registers_does_not_make_the_host_wait(tmp_path: Path) -> None:
    """Constant buffers, a weighter that looks at each step, and clipping: still one wait per step."""
    module = """
from torch import nn
import torch

layers = [nn.Conv2d(1, 1, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 1)]
module = nn.Sequential(*layers)
for number in range(24):
    module.register_buffer(f"mask_{number}", torch.ones(3))
"""
    write_deep(
        tmp_path,
        module=module,
        training={"checkpoint_every_steps": None, "grad_clip_norm": 1e-6},
        logging={"text": {"every_steps": 1000}},
        data_loading={"step_min_items": 16},
    )
    weighter = tmp_path / "experiment_settings" / "deep" / "pymodules" / "loss_weighter.py"
    weighter.write_text(
        "from pipeline.components import MovingAverageLossWeighter\n\n"
        "loss_weighter = MovingAverageLossWeighter(decay=0.8)\n"
    )
    first, *others = steps_of(tmp_path, "deep")
    # The first batch of each dataset is compared by value.
    assert first["waits"] <= 2
    assert {step["waits"] for step in others} == {1}


def test_float64_and_complex_weights_train(tmp_path: Path) -> None:
    """Their gradients have norms too."""
    module = """
import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.turned = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, images):
        pixels = images[:, 0, 0, :]
        return ((pixels * self.turned).real + pixels * self.wide).float().sum(1, keepdim=True)


module = Odd()
"""
    write_deep(tmp_path, module=module)
    finished(tmp_path, "--stop-after-epoch", "1", simulated=False, name="deep")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_two_processes_have_the_bits_of_the_cpu(tmp_path: Path, reduction: str, precision: str) -> None:
    """Collectives in the queue, the scaler, autocast and the tree of exact sums."""
    training = {"gradient_reduction": reduction, "precision": precision}
    sim, cpu = on_both(tmp_path, nproc=2, training=training)
    differing = [path for path, content in data_of(cpu).items() if data_of(sim).get(path) != content]
    assert differing == []


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [None, 2, 3])
def test_exact_resumes_on_the_device_after_kills(tmp_path: Path, nproc: int | None) -> None:
    """Killed twice inside an epoch and resumed with other numbers of processes, it ends as the CPU left alone."""
    training = {"gradient_reduction": "exact"}
    for home in ("sim", "cpu"):
        write_experiment(tmp_path / home, training=training)
    finished(tmp_path / "cpu", simulated=False)
    state_file = tmp_path / "sim" / "experiment_results" / "tiny" / "state.json"
    for generation in (4, 8):
        with BackgroundRun(tmp_path / "sim", "--auto", nproc=nproc, env=SIMULATED) as run:
            run.wait_for(lambda wanted=generation: committed(state_file) >= wanted)
            run.kill()
    finished(tmp_path / "sim", "--auto", nproc=2)
    assert data_of(tmp_path / "sim") == data_of(tmp_path / "cpu")


@pytest.mark.slow
def test_evaluation_on_the_device_has_the_values_of_the_cpu(tmp_path: Path) -> None:
    """The verb reads the same weights and prints the same numbers."""
    write_experiment(tmp_path)
    finished(tmp_path, "--stop-after-epoch", "1")
    words = ["evaluate", "tiny", "--pool", "last", "--json", "--data-home", str(tmp_path)]
    line = [sys.executable, "-m", "pipeline", *words]
    printed = [
        subprocess.run(line, cwd=ROOT, env=environment(env), capture_output=True, text=True, check=True).stdout
        for env in (SIMULATED, {})
    ]
    assert printed[0] == printed[1]


def committed(state_file: Path) -> int:
    return int(json.loads(state_file.read_text())["generation"]) if state_file.exists() else 0
