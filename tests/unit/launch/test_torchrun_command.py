"""The lines that `run` and `launch` start, before anything is started."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.arguments import parse_arguments
from pipeline.monitoring.experiment_state import state_of
from pipeline.monitoring.launch_record import record_launch
from pipeline.paths import ExperimentPaths
from pipeline.system import nvidia_smi
from tests.support.experiments import tree, write_experiment
from tests.support.running import run_inside
from tests.support.verbs import call


@pytest.fixture
def several(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data home with three experiments, on a machine whose user has chosen nothing."""
    for name in ("second", "third"):
        write_experiment(home, name)
    for variable in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    return home


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    """Return the variables of every line that trains, with the words behind them."""
    lines = [line for line in capsys.readouterr().out.splitlines() if "--nproc" in line]
    found = []
    for words in map(shlex.split, lines):
        variables = [word for word in words if word.split("=")[0].isupper()]
        found.append({**dict(word.split("=", 1) for word in variables), "words": " ".join(words[len(variables) :])})
    return found


def test_printed_line_has_all_it_needs(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Free port, folder for the output, error file, threads and devices are all in the line; nothing is written."""
    before = tree(several)
    assert call(several, "run", "tiny", "--gpus", "0,2", "--print", "--", "--auto") == 0
    (line,) = printed(capsys)
    assert line["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert line["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert line["OMP_NUM_THREADS"] == "6"
    assert line["TORCHELASTIC_ERROR_FILE"].endswith("tiny/error.json")
    assert "--standalone --nproc-per-node=2" in line["words"]
    assert f"--log-dir={several}/experiment_logs/tiny/torchrun --redirects=1:3" in line["words"]
    assert parse_arguments(line["words"].split("training_pipeline ")[1].split()).mode == "auto"
    assert tree(several) == before


def test_number_of_threads_stays_what_it_was(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A continued run uses as many threads as before, because bits depend on them."""
    run_inside(several, "--stop-after-epoch", "0")
    capsys.readouterr()
    call(several, "run", "tiny", "--nproc", "3", "--print")
    assert printed(capsys)[0]["OMP_NUM_THREADS"] == "1"


def test_own_choice_of_threads_is_respected(
    several: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that is set stays as it is."""
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    call(several, "run", "tiny", "--print")
    assert printed(capsys)[0]["OMP_NUM_THREADS"] == "5"


def test_launched_experiments_share_the_machine(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Threads are divided among all that run at once; those of a chain take turns."""
    assert call(several, "launch", "tiny:0-1", "then", "second:0-1", "third:2", "--print") == 0
    text = printed(capsys)
    assert [line["CUDA_VISIBLE_DEVICES"] for line in text] == ["0,1", "0,1", "2"]
    assert {line["OMP_NUM_THREADS"] for line in text} == {"4"}
    assert all(line["words"].endswith("--auto") for line in text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch", "tiny:0-1", "second:1-2"), "tiny and second must not share GPUs, but both have 1."),
        (("launch", "tiny:0", "second:0"), "tiny and second must not share GPUs, but both have 0."),
        (("launch", "tiny:0,3", "second:1", "third:2,3"), "tiny and third must not share GPUs, but both have 3."),
        (("launch", "tiny:0", "then", "second:1", "third:1"), "tiny and third must not share GPUs, but both have 1."),
        (("launch", "tiny", "tiny"), "tiny must be launched once only."),
        (("launch", "then", "tiny"), "'then' must stand between two experiments."),
        (("launch", "tiny", "then"), "'then' must stand between two experiments."),
        (("launch", "tinny"), "Did you mean 'tiny'?"),
        (("launch", "tiny:x"), "GPUs must be given as"),
        (("run", "tiny", "--gpus", "0", "--nproc", "2"), "have a GPU each, but is 2 on 1 GPUs"),
        (("run", "tiny", "--nproc", "0"), "must be at least 1"),
        (("run", "tinny"), "Did you mean 'tiny'?"),
    ],
)
def test_bad_launches_are_told(
    several: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    """What cannot be is refused with exit code 2 before anything is started or written."""
    before = tree(several)
    assert call(several, *words) == 2
    assert said in capsys.readouterr().err
    assert tree(several) == before


def test_flags_are_checked_before_the_start(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that training does not know is refused here already."""
    with pytest.raises(SystemExit):
        call(several, "run", "tiny", "--", "--resumee")
    assert "--resumee" in capsys.readouterr().err


def test_experiment_is_checked_before_the_start(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A broken experiment and one with results are refused without starting any process."""
    run_inside(several, "--stop-after-epoch", "1")
    write_experiment(several, "second", training={"sede": 1})
    before = tree(several)
    assert call(several, "run", "tiny") == 3
    assert call(several, "run", "second") == 2
    assert "Did you mean 'seed'?" in capsys.readouterr().err
    assert tree(several) == before


def test_finished_experiment_is_not_started(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to run, and that is said."""
    run_inside(several)
    assert call(several, "run", "tiny") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_experiment_is_launched_once(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is on its way already is not started again."""
    paths = ExperimentPaths(several, "tiny")
    paths.error_files.mkdir(parents=True)
    record_launch(paths, 1)
    assert call(several, "launch", "tiny") == 3
    assert "'tiny' is starting already" in capsys.readouterr().err


def break_settings(home: Path) -> None:
    write_experiment(home, "second", training={"sede": 1})


def break_python(home: Path) -> None:
    (home / "experiment_settings/second/pymodules/early_stopper.py").write_text("early_stopper = (\n")


def train_and_edit(home: Path) -> None:
    run_inside(home, "--stop-after-epoch", "1", name="second")
    with (home / "experiment_results/second/pymodules/early_stopper.py").open("a") as file:
        file.write("# edited\n")


def train(home: Path) -> None:
    run_inside(home, "--stop-after-epoch", "1", name="second")


def leave(home: Path) -> None:
    """Change nothing."""


@pytest.mark.parametrize(
    ("prepare", "flags", "code", "said"),
    [
        (break_settings, (), 2, "Did you mean 'seed'?"),
        (break_python, (), 2, "early_stopper.py:1: must be valid Python: '(' was never closed"),
        (leave, ("--set", "training.sede=1"), 2, "unknown key 'sede'"),
        (leave, ("--", "--resume"), 3, "has no results to resume"),
        (train, ("--", "--stop-after-epoch", "2"), 3, "'second' has unfinished results"),
        (train, ("--set", "training.seed=9"), 2, "frozen since the experiment started"),
        (train_and_edit, (), 2, "--accept-edited-copy"),
    ],
)
@pytest.mark.parametrize("verb", [["launch"], ["slurm", "--time", "10", "--submit"]], ids=["launch", "slurm"])
def test_what_cannot_run_is_not_launched(
    several: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: list[str],
    prepare: Callable[[Path], None],
    flags: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    """In the background a refusal is seen by nobody: it comes at the prompt, before any of them is started."""
    monkeypatch.setattr("pipeline.commands.slurm.check_can_submit", lambda: None)
    if verb[0] == "slurm" and "--" in flags:
        pytest.skip("a job always has --auto")
    prepare(several)
    before = tree(several)
    assert call(several, verb[0], "tiny", "second", *verb[1:], *flags) == code
    assert said in capsys.readouterr().err
    assert tree(several) == before


def test_file_that_nothing_imports_may_be_anything(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a run would not refuse is launched; a finished experiment too, which then does nothing."""
    (several / "experiment_settings/second/pymodules/utils/old.py").write_text("print 'of another Python'\n")
    run_inside(several)
    assert call(several, "launch", "tiny", "second", "--print") == 0


def test_messages_of_a_launched_run_name_the_same_devices(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Continued from its log, an experiment stays on its GPUs and in the background."""
    assert call(several, "launch", "tiny:2-3", "second:1", "--print") == 0
    lines = [line["TRAINING_PIPELINE_LAUNCH"] for line in printed(capsys)]
    assert lines == ["run --nproc 2 --gpus 2,3 --detach", "run --nproc 1 --gpus 1 --detach"]


def test_launch_whose_run_has_ended_is_not_starting(several: Path) -> None:
    """While torchrun is still leaving, an experiment that stopped is unfinished, and a new launch of it starts."""
    paths = ExperimentPaths(several, "tiny")
    paths.error_files.mkdir(parents=True)
    record_launch(paths, 1)
    assert state_of(paths) == "starting"
    run_inside(several, "--stop-after-epoch", "0")
    assert state_of(paths) == "unfinished"
    record_launch(paths, 1)
    assert state_of(paths) == "starting"


@pytest.mark.parametrize("verb", ["run", "launch"])
def test_gpus_that_cannot_be_counted_are_not_taken_for_none(
    several: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """One process on a machine of eight GPUs would waste a night."""
    monkeypatch.setattr(nvidia_smi, "look_at_gpus", lambda seconds: ([], "nvidia-smi did not answer"))
    assert call(several, verb, "tiny", "--print") == 2
    said = capsys.readouterr()
    assert "give the number of processes with --nproc N" in said.err
    assert "--nproc" not in said.out
