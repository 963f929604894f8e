"""The batch script for Slurm, before anything is submitted, and what is told of jobs that were."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pipeline.commands.slurm import _seconds
from pipeline.launch.torchrun_command import ROOT
from pipeline.monitoring.experiment_state import read_overview, state_of
from pipeline.monitoring.launch_record import record_job
from pipeline.paths import ExperimentPaths
from pipeline.system import slurm_client as scheduler
from tests.support.experiments import tree, write_experiment
from tests.support.running import environment, run_inside
from tests.support.verbs import call

DAY = 86400


@pytest.fixture
def several(home: Path) -> Path:
    """A data home with three experiments."""
    for name in ("second", "third"):
        write_experiment(home, name)
    return home


def printed(home: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert call(home, "slurm", *words, "--print") == 0
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def options(script: str) -> dict[str, str]:
    """Return the options that a script gives to sbatch."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))


def test_script_of_one_node_asks_for_what_was_said(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Limits, signal and requeue are options of sbatch; processes are as many as GPUs; nothing is written."""
    before = tree(several)
    words = ("--gpus-per-node", "4", "--cpus-per-task", "16", "--time", "4:00:00", "--sbatch=--partition=gpu")
    script = printed(several, capsys, "tiny", *words)
    found = options(script)
    assert (found["nodes"], found["gpus-per-node"], found["cpus-per-task"]) == ("1", "4", "16")
    assert (found["time"], found["signal"], found["requeue"]) == ("4:00:00", "B:USR1@120", "")
    assert (found["open-mode"], found["partition"]) == ("append", "gpu")
    assert "--standalone --nproc-per-node=4" in script
    assert "training_pipeline tiny" in script
    assert tree(several) == before


def test_threads_are_shares_of_the_cpus_of_a_job(
    several: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of processors of the login node means nothing to a job."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = printed(several, capsys, "tiny", "--nproc", "4", "--cpus-per-task", "12", "--time", "10")
    assert "export OMP_NUM_THREADS=3\n" in script


def test_nodes_meet_on_the_first_one(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On several nodes torchrun has no port of its own, but is told where to meet the others."""
    script = printed(several, capsys, "tiny", "--nodes", "3", "--time", "10")
    assert "--nnodes=3 --rdzv-backend=c10d" in script
    assert "--standalone" not in script


def test_experiments_side_by_side_are_one_array(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each task has its own experiment, log and error file."""
    script = printed(several, capsys, "tiny", "second", "third", "--at-once", "2", "--time", "10")
    assert options(script)["array"] == "0-2%2"
    assert re.findall(r"^(\d)\)\n    experiment=(\w+)", script, re.MULTILINE) == [
        ("0", "tiny"),
        ("1", "second"),
        ("2", "third"),
    ]
    assert len(set(re.findall(r"exec >> (\S+)", script))) == 3


def test_experiments_in_turn_are_jobs_of_their_own(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stage of a chain has a script."""
    assert call(several, "slurm", "tiny", "then", "second", "--time", "10") == 0
    for name in ("tiny", "second"):
        assert f"experiment={name}\n" in ExperimentPaths(several, name).batch_script.read_text()
    assert "submitted" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("4:00:00", DAY // 6),
        ("2-0", 2 * DAY),
        ("1-12:30", DAY * 3 // 2 + 1800),
        ("0-0:0:7", 7),
    ],
)
def test_time_is_read_as_slurm_reads_it(text: str, seconds: int) -> None:
    """One number is minutes, two are minutes and seconds, and behind days hours come first."""
    assert _seconds(text) == seconds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tiny", "--time", "4h"), "--time must be minutes, H:M:S or D-H:M:S, but is '4h'."),
        (("tiny", "--time", "0:00"), "--time must be"),
        (("tiny", "--time", "2"), "--grace must be shorter than --time, but is 120 s of 120 s."),
        (("tiny", "--time", "9", "--nodes", "0"), "--nodes must be at least 1, but is 0."),
        (("tiny", "--time", "9", "--nproc", "0"), "--nproc must be at least 1"),
        (("tiny", "--time", "9", "--sbatch", "gpu"), "must name an option of sbatch, but is 'gpu'"),
        (("tiny", "--time", "9", "--sbatch=--time=3"), "would change what the script depends on"),
        (("tiny", "--time", "9", "--sbatch=-N2"), "would change what the script depends on"),
        (("tiny", "--time", "9", "--sbatch=--comment=a\nrm"), "must name an option of sbatch"),
        (("tiny", "then", "second", "third", "--time", "9"), "must stand between all experiments or none"),
        (("tiny", "tiny", "--time", "9"), "tiny must be launched once only."),
        (("tinny", "--time", "9"), "Did you mean 'tiny'?"),
        (("tiny", "--time", "9", "--", "--reset"), "its run always has --auto"),
    ],
)
def test_bad_jobs_are_told(
    several: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    """What cannot be is refused with exit code 2 before anything is written."""
    before = tree(several)
    assert call(several, "slurm", *words) == 2
    assert said in capsys.readouterr().err
    assert tree(several) == before


def test_submitting_needs_slurm(
    several: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without sbatch one sentence says so, and nothing is written."""
    monkeypatch.setenv("PATH", str(several))
    before = tree(several)
    assert call(several, "slurm", "tiny", "--time", "10", "--submit") == 2
    assert "--submit needs Slurm's sbatch, but this machine has none." in capsys.readouterr().err
    assert tree(several) == before


# ---------------------------------------------------------------------- jobs


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that stand in for those of Slurm, first on the path."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    scheduler._query_job.cache_clear()
    return folder


def put(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def record(home: Path, job: str, after: str | None = None) -> ExperimentPaths:
    paths = ExperimentPaths(home, "tiny")
    paths.error_files.mkdir(parents=True)
    record_job(paths, job, after)
    return paths


def test_submitted_job_is_seen_until_it_runs(several: Path, commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job in the queue is waiting: status says so with its number, and it is neither launched again nor stopped."""
    put(commands, "squeue", "echo PENDING Resources")
    put(commands, "sbatch", "echo 77")
    assert call(several, "slurm", "tiny", "--time", "10", "--submit") == 0
    assert state_of(ExperimentPaths(several, "tiny")) == "waiting"
    assert call(several, "status", "tiny", "--exit-code") == 4
    assert "job        77 of Slurm: PENDING (Resources)" in capsys.readouterr().out
    assert call(several, "slurm", "tiny", "--time", "10", "--submit") == 3
    assert call(several, "stop", "tiny") == 3
    assert "scancel 77" in capsys.readouterr().err


@pytest.mark.parametrize("body", ["exit 0", "echo 'Invalid job id specified' >&2; exit 1"])
def test_job_that_is_over_is_forgotten(several: Path, commands: Path, body: str) -> None:
    """Without a job the experiment is what its results say."""
    put(commands, "squeue", body)
    assert state_of(record(several, "77")) == "new"


def test_job_sees_its_own_experiment_as_it_is(several: Path, commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script that asks how its run ended must not hear that it is starting."""
    put(commands, "squeue", "echo RUNNING None")
    paths = record(several, "77_1")
    assert state_of(paths) == "starting"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert state_of(paths) == "new"


def test_odd_record_is_no_question_to_slurm(several: Path, commands: Path) -> None:
    """What stands in the file of a launch is never taken for more than a job's number."""
    put(commands, "squeue", "echo PENDING None")
    assert state_of(record(several, "77 --all")) == "new"


def test_refused_submission_is_told(several: Path, commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What sbatch says is passed on, without a stack trace."""
    put(commands, "sbatch", "echo 'invalid partition specified: gpu' >&2; exit 1")
    assert call(several, "slurm", "tiny", "--time", "10", "--sbatch=--partition=gpu", "--submit") == 1
    assert "invalid partition specified: gpu" in capsys.readouterr().err
    assert state_of(ExperimentPaths(several, "tiny")) == "new"


# ---------------------------------------------------------------------- the script itself


def run_script(home: Path, commands: Path, srun: str, time: str = "10", **variables: str) -> tuple[int, str]:
    """Run the script of a job here; return its exit code and what it says after its beginning."""
    put(commands, "srun", srun)
    put(commands, "squeue", "echo RUNNING None")
    put(commands, "scontrol", 'echo "scontrol $*"')
    assert call(home, "slurm", "tiny", "--time", time, "--grace", "1") == 0
    script = ExperimentPaths(home, "tiny").batch_script
    own = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", **variables}
    done = subprocess.run(["bash", script], env=environment(own), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.partition("started on n1")[2]


def test_crash_keeps_its_code(several: Path, commands: Path) -> None:
    """A run that failed while all nodes answer is not repeated."""
    code, said = run_script(several, commands, '[ "${@: -1}" = true ] || exit 7')
    assert code == 7
    assert "ended with code 7, unfinished; not requeued" in said


def test_failure_with_a_lost_node_is_requeued(several: Path, commands: Path) -> None:
    """Where a node does not answer any more, the failure of the others is no crash."""
    code, said = run_script(several, commands, "exit 1", SLURM_RESTART_COUNT="3")
    assert code == 1
    assert "a node does not answer; requeued\nscontrol requeue 77" in said


def test_stop_on_request_is_not_requeued(several: Path, commands: Path) -> None:
    """Whoever asks a run to stop does not want it back, and what comes after it must not start."""
    run_inside(several, "--stop-after-epoch", "0")
    code, said = run_script(several, commands, "exit 0")
    assert code == 1
    assert "ended with code 0, unfinished; not requeued" in said


def test_signal_of_an_earlier_life_is_no_excuse(several: Path, commands: Path) -> None:
    """A job that fails before its run has begun is not taken for the preempted one before it."""
    run_inside(several, "--stop-after-epoch", "0")
    journal = ExperimentPaths(several, "tiny").journal_file
    journal.write_text(journal.read_text().replace("epoch 0 is complete", "SIGTERM"))
    assert "SIGTERM" in read_overview(ExperimentPaths(several, "tiny")).ended.reason
    code, said = run_script(several, commands, '[ "${@: -1}" = true ] || exit 1')
    assert code == 1
    assert "ended with code 1, unfinished; not requeued" in said


def test_job_that_commits_nothing_is_not_requeued(several: Path, commands: Path) -> None:
    """A job that spent its time without a commit would do so for ever."""
    code, said = run_script(several, commands, "sleep 1.5; kill -USR1 $PPID; sleep 0.5", time="0:03")
    assert code == 1
    assert "not requeued: nothing was committed, and a longer --time is needed" in said


def test_job_that_is_short_of_time_is_requeued(several: Path, commands: Path) -> None:
    """The signal before the limit leads to a requeue of just this task of an array."""
    words = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "4"}
    code, said = run_script(several, commands, "kill -USR1 $PPID; sleep 0.5", **words)
    assert code == 1
    assert "stopped before the end of the job; requeued\nscontrol requeue 70_4" in said


def test_limit_of_requeues_ends_a_job(several: Path, commands: Path) -> None:
    """A job that has been requeued as often as allowed ends unfinished, and says so."""
    code, said = run_script(several, commands, "kill -USR1 $PPID; sleep 0.5", SLURM_RESTART_COUNT="100")
    assert code == 1
    assert "not requeued: the limit is reached" in said
    assert "scontrol" not in said


def test_cancelled_job_is_left_alone(several: Path, commands: Path) -> None:
    """What Slurm has ended for another reason than its time is not brought back."""
    ends = f"printf '#!/bin/bash\necho COMPLETING None\n' > {commands}/squeue"
    code, said = run_script(several, commands, f"{ends}; kill -TERM $PPID; sleep 0.5")
    assert code == 1
    assert "left to Slurm, which has ended the job" in said


def test_finished_experiment_ends_with_zero(several: Path, commands: Path) -> None:
    """Only then does a job let the one that waits for it go."""
    run_inside(several)
    code, said = run_script(several, commands, "exit 0")
    assert code == 0
    assert "times: finished" in said


def test_setup_is_sourced_before_anything_runs(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a shell script activates holds for the whole job; a file that is not there is refused."""
    setup = tmp_path / "my setup.sh"
    setup.write_text("export ACTIVATED=1\n")
    assert call(home, "slurm", "tiny", "--time", "10", "--print", "--setup", str(setup)) == 0
    script = capsys.readouterr().out
    assert f"source '{setup}'" in script
    assert script.index("source ") < script.index("srun ")
    assert call(home, "slurm", "tiny", "--time", "10", "--print", "--setup", "nosuch.sh") == 2
    assert "--setup must be a shell script, but nosuch.sh is not a file." in capsys.readouterr().err


def test_container_runs_the_training_with_its_own_python(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """srun gets the image and all folders that a run needs; the script's own verbs stay outside."""
    image = "docker://torch:2.13"
    assert call(home, "slurm", "tiny", "--time", "10", "--print", "--container-image", image) == 0
    script = capsys.readouterr().out
    (container,) = [line for line in script.splitlines() if line.startswith("container=")]
    options = shlex.split(container.removeprefix("container=(").removesuffix(")"))
    assert options[0] == f"--container-image={image}"
    assert f"{home}:{home}" in options[1].removeprefix("--container-mounts=").split(",")
    assert f"{ROOT}:{ROOT}" in options[1].removeprefix("--container-mounts=").split(",")
    (training,) = [line for line in script.splitlines() if line.startswith("training=")]
    assert training.startswith(f"training=(env PYTHONPATH={ROOT} python3 -m torch.distributed.run ")
    assert '"${container[@]}" "${training[@]}"' in script
    assert call(home, "slurm", "tiny", "--time", "10", "--print") == 0
    assert "container=()" in capsys.readouterr().out
