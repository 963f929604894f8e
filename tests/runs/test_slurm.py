"""Jobs of a real Slurm: time limits, signals, preemption, dead nodes, crashes, chains and arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.lifecycle.starts import read_starts
from pipeline.monitoring.experiment_state import LIVE, read_experiment_state, read_overview, state_of
from pipeline.paths import ExperimentPaths, pool_file
from pipeline.store.compare import first_difference, read_any
from pipeline.store.lock import read_owner
from tests.support.experiments import write_experiment
from tests.support.running import run_inside, run_process
from tests.support.slurm import NODES, Cluster, cluster, missing_programs
from tests.support.verbs import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# The first lives of a job take their time, so that it is certain where it is interrupted.
SLOW = """
    import os
    import time

    from . import a

    loss_registers = ["loss_b", "error"]


    class ModuleTransform(a.ModuleTransform):
        head = "head_b"
        register = "loss_b"

        def __call__(self, batch, modules):
            is_slow = int(os.environ.get("SLURM_RESTART_COUNT", 0)) < {lives} and modules["trunk"].training
            time.sleep({seconds} if is_slow else 0)
            return super().__call__(batch, modules)
"""
RAISES = """
    from . import a

    loss_registers = ["loss_b", "error"]


    class ModuleTransform(a.ModuleTransform):
        def __call__(self, batch, modules):
            raise ValueError("no such column")
"""


@pytest.fixture(scope="session")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("the daemons of Slurm need root")
    if missing := missing_programs():
        assert os.environ.get("CI") != "true", f"Slurm must be installed, but there is no {', '.join(missing)}"
        pytest.skip(f"needs {', '.join(missing)}")
    with cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def slurm(one_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, as a user on its login node sees it; no job outlives a test."""
    for name, value in {**one_cluster.variables, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    yield one_cluster
    one_cluster.ask("scancel", "--user=root")
    one_cluster.wait_for(lambda: one_cluster.ask("squeue", "--noheader") == "")


def write_slow(home: Path, name: str, lives: int, seconds: float) -> ExperimentPaths:
    """Write an experiment that sleeps for each batch in the first lives of a job."""
    write_experiment(home, name, {"pymodules/module_transforms/b.py": SLOW.format(lives=lives, seconds=seconds)})
    return ExperimentPaths(home, name)


def wait_for_step(slurm: Cluster, paths: ExperimentPaths) -> None:
    """Wait until a run has committed a step of its first epoch."""
    slurm.wait_for(lambda: getattr(read_experiment_state(paths).results.progress, "step", 0) > 0)


def wait_until_over(slurm: Cluster, *everyone: ExperimentPaths) -> None:
    """Wait until Slurm has no job any more, and everyone who looks knows it."""
    slurm.wait_for(lambda: slurm.ask("squeue", "--noheader") == "", seconds=400)
    slurm.wait_for(lambda: not {state_of(paths) for paths in everyone} & {*LIVE})


def wait_for_end(slurm: Cluster, *everyone: ExperimentPaths) -> None:
    wait_until_over(slurm, *everyone)
    for paths in everyone:
        assert state_of(paths) == "finished", paths.launcher_log.read_text()


def job_of(paths: ExperimentPaths) -> str:
    return str(json.loads(paths.launch_file.read_text())["job"])


def num_lives(paths: ExperimentPaths) -> int:
    return len(read_starts(paths))


def test_job_goes_on_over_time_limits_to_the_same_bits(slurm: Cluster, tmp_path: Path) -> None:
    """An experiment that needs three jobs of a minute ends as one that was never interrupted."""
    paths = write_slow(tmp_path, "limited", lives=2, seconds=6)
    assert call(tmp_path, "slurm", "limited", "--time", "1", "--grace", "15", "--submit") == 0
    write_slow(tmp_path, "whole", lives=0, seconds=0)
    run_inside(tmp_path, name="whole")
    wait_for_end(slurm, paths)
    assert num_lives(paths) == 3
    assert read_owner(paths)["job"] == job_of(paths)
    assert first_difference(paths.other("whole").data, paths.data) is None


def test_experiment_on_two_nodes_survives_the_death_of_one(slurm: Cluster, tmp_path: Path) -> None:
    """Processes of two nodes train together; when a node dies the job comes back, and ends with the same bits."""
    paths = write_slow(tmp_path, "both", lives=1, seconds=1)
    assert call(tmp_path, "slurm", "both", "--nodes", "2", "--time", "10", "--submit") == 0
    wait_for_step(slurm, paths)
    slurm.kill_node(NODES[1])
    slurm.wait_for(lambda: state_of(paths) == "waiting")
    slurm.start_node(NODES[1])
    write_slow(tmp_path, "whole", lives=0, seconds=0)
    assert run_process(tmp_path, name="whole", nproc=2).returncode == 0
    wait_for_end(slurm, paths)
    assert [start["world_size"] for start in read_starts(paths)] == [2, 2]
    assert first_difference(paths.other("whole").data, paths.data) is None


STARTS_FROM_FIRST = """
    from torch import nn

    module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
    settings = {
        "frozen": False,
        "load_weights_from_exp": {"exp_name": "first", "ckp_pool_name": "best", "module_name": "trunk"},
    }
"""


def test_second_stage_waits_until_the_first_has_finished(slurm: Cluster, tmp_path: Path) -> None:
    """A requeue of the first stage does not let the second one go; its end does."""
    first = write_slow(tmp_path, "first", lives=1, seconds=1)
    write_experiment(tmp_path, "second", {"pymodules/modules/trunk.py": STARTS_FROM_FIRST})
    second = ExperimentPaths(tmp_path, "second")
    assert call(tmp_path, "slurm", "first", "then", "second", "--time", "10", "--submit") == 0
    wait_for_step(slurm, first)
    assert slurm.ask("scancel", "--batch", "--signal=USR1", job_of(first)) == ""
    slurm.wait_for(lambda: state_of(first) == "waiting")
    assert state_of(second) == "waiting"
    wait_for_end(slurm, first, second)
    assert num_lives(first) == 2
    given, taken = (read_any(pool_file(*pool, "trunk")) for pool in ((first.data, "best"), (second.data, "init")))
    assert all(torch.equal(given[name], taken[name]) for name in given)


def test_second_stage_is_given_up_with_the_first(slurm: Cluster, tmp_path: Path) -> None:
    """A crash is not repeated, its traceback is kept, and what would have come after is taken away."""
    write_experiment(tmp_path, "first", {"pymodules/module_transforms/b.py": RAISES})
    write_experiment(tmp_path, "second")
    first, second = ExperimentPaths(tmp_path, "first"), ExperimentPaths(tmp_path, "second")
    assert call(tmp_path, "slurm", "first", "then", "second", "--time", "10", "--submit") == 0
    wait_until_over(slurm, first, second)
    assert num_lives(first) == 1
    assert "no such column" in read_overview(first).ended.errors[0].error
    assert "unfinished; not requeued" in first.launcher_log.read_text()
    assert state_of(second) == "new"


def test_preempted_job_commits_and_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    """A job that must make room stops at a step, waits, and ends with the same bits."""
    paths = write_slow(tmp_path, "modest", lives=1, seconds=1)
    words = ("--cpus-per-task", "8", f"--sbatch=--nodelist={NODES[0]}")
    assert call(tmp_path, "slurm", "modest", "--time", "10", *words, "--submit") == 0
    wait_for_step(slurm, paths)
    urgent = ("--partition=urgent", f"--nodelist={NODES[0]}", "--cpus-per-task=8", "--output=/dev/null")
    slurm.ask("sbatch", *urgent, "--wrap", "true")
    write_slow(tmp_path, "whole", lives=0, seconds=0)
    run_inside(tmp_path, name="whole")
    wait_for_end(slurm, paths)
    assert "stopped by a signal; requeued" in paths.launcher_log.read_text()
    assert first_difference(paths.other("whole").data, paths.data) is None


def test_cancelled_job_stays_away(slurm: Cluster, tmp_path: Path) -> None:
    """What a user cancels has committed its step, and does not come back."""
    paths = write_slow(tmp_path, "unwanted", lives=9, seconds=1)
    assert call(tmp_path, "slurm", "unwanted", "--time", "10", "--submit") == 0
    wait_for_step(slurm, paths)
    slurm.ask("scancel", job_of(paths))
    wait_until_over(slurm, paths)
    assert read_overview(paths).ended.outcome == "stopped"
    assert state_of(paths) == "unfinished"


def test_each_task_of_an_array_goes_on_by_itself(slurm: Cluster, tmp_path: Path) -> None:
    """The last task, which has the number of the whole array, is requeued without the others."""
    everyone = [write_slow(tmp_path, name, lives=number, seconds=1) for number, name in enumerate(("a", "b"))]
    assert call(tmp_path, "slurm", "a", "b", "--time", "10", "--max-requeues", "1", "--submit") == 0
    wait_for_step(slurm, everyone[1])
    slurm.ask("scancel", "--batch", "--signal=USR1", job_of(everyone[1]))
    wait_for_end(slurm, *everyone)
    assert [num_lives(paths) for paths in everyone] == [1, 2]
    assert "finished" in everyone[0].launcher_log.read_text()
    assert first_difference(everyone[0].data, everyone[1].data) is None
