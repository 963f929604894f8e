"""Every command that a message prints is provoked here, pasted into a shell as it stands, and works."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pipeline.command_lines import launched_by
from pipeline.commands import slurm
from pipeline.distributed.processes import Processes
from pipeline.launch.hosted_agent import _conclude
from pipeline.launch.torchrun_command import training_line
from pipeline.paths import ExperimentPaths
from pipeline.worker import conclude_failure
from tests.support.experiments import write_experiment
from tests.support.printed import commands_of, paste
from tests.support.running import SECONDS, end_launched, run_inside, run_process
from tests.support.verbs import call, held

ROOT = Path(__file__).parents[2]


def said_by_run(home: Path, *words: str, name: str = "tiny") -> str:
    result = run_process(home, *words, name=name)
    return result.stdout + result.stderr


def said_by(act: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what an action prints or refuses with."""
    message = ""
    try:
        act()
    except (Exception, SystemExit) as error:
        message = str(error)
    captured = capsys.readouterr()
    return captured.out + captured.err + message


Provoke = Callable[[Path, pytest.CaptureFixture[str]], str]


@dataclass(frozen=True)
class Case:
    """A message: which calls build its commands, how it comes about, how many it has and how they end."""

    sites: tuple[str, ...]
    provoke: Provoke
    num_commands: int
    code: int = 0
    trains: bool = False


def finish(home: Path) -> None:
    run_inside(home, "--resume")


def damage(home: Path, pattern: str) -> None:
    for path in (home / "experiment_results" / "tiny" / "generations").glob(pattern):
        path.write_bytes(b"damaged")


def crash_in_author_code(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    for folder in (home / "experiment_settings", home / "experiment_results"):
        path = folder / "tiny" / "pymodules" / "utils" / "points.py"
        broken = "def __getitem__(self, idx):\n        assert 'BREAK' not in __import__('os').environ, 'broken'"
        path.write_text(path.read_text().replace("def __getitem__(self, idx):", broken))
    result = run_process(home, "--resume", "--accept-edited-copy", env={"BREAK": "1"})
    return result.stdout + result.stderr


def crash_in_the_pipeline(error: BaseException) -> Provoke:
    def provoke(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
        paths = ExperimentPaths(home, "tiny")
        return said_by(lambda: conclude_failure(error, Processes(), paths), capsys)

    return provoke


def crash_untrained(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    shutil.rmtree(home / "experiment_results")
    return crash_in_the_pipeline(RuntimeError("something else"))(home, capsys)


def interrupt_untrained(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    shutil.rmtree(home / "experiment_results")
    return crash_in_the_pipeline(KeyboardInterrupt())(home, capsys)


def end_a_process(exit_code: int) -> Provoke:
    """Return what the verb that hosts the processes prints of one that ended without a word."""

    def provoke(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
        line = training_line(ExperimentPaths(home, "tiny"), nproc=2, flags=[], in_background=False)
        failure = ProcessFailure(local_rank=1, pid=1, exitcode=exit_code, error_file=str(home / "none.json"))
        with launched_by("train", ["--nproc", "2"]):
            return said_by(lambda: _conclude(line, 1, failure, is_seen=False), capsys)

    return provoke


def change_data(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = home / "experiment_results" / "tiny" / "pymodules" / "datasets" / "a.py"
    path.write_text(path.read_text().replace("50", "51"))
    return said_by_run(home, "--resume", "--accept-edited-copy")


def remove_half_of_the_settings(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    shutil.rmtree(home / "experiment_results")
    shutil.rmtree(home / "experiment_settings" / "tiny" / "settings")
    return said_by_run(home)


def submit_to_slurm(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    job = SimpleNamespace(paths=ExperimentPaths(home, "tiny"), lines=[], is_array=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "submit", lambda *words: "7")
        return said_by(lambda: slurm._submit([job]), capsys)  # type: ignore[list-item]


def launch_in_background(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    text = said_by(lambda: call(home, "launch", "tiny", "--nproc", "1"), capsys)
    end_launched(home)
    return "\n".join(line for line in text.splitlines() if line.startswith("watch"))


def run_without_a_name(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return paste(f"{sys.executable} training_pipeline.py --data-home {home}").stderr


def verb(*words: str) -> Provoke:
    return lambda home, capsys: said_by(lambda: call(home, *words), capsys)


def training(*words: str, name: str = "tiny") -> Provoke:
    return lambda home, capsys: said_by_run(home, *words, name=name)


def when_finished(provoke: Provoke) -> Provoke:
    def finish_and_provoke(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
        finish(home)
        capsys.readouterr()
        return provoke(home, capsys)

    return finish_and_provoke


def when_damaged(pattern: str, provoke: Provoke) -> Provoke:
    def damage_and_provoke(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
        damage(home, pattern)
        return provoke(home, capsys)

    return damage_and_provoke


def when_empty(provoke: Provoke) -> Provoke:
    def empty_and_provoke(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
        shutil.rmtree(home / "experiment_results")
        shutil.rmtree(home / "experiment_settings")
        return provoke(home, capsys)

    return empty_and_provoke


def when_reset(provoke: Provoke) -> Provoke:
    def reset_and_provoke(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
        shutil.rmtree(home / "experiment_results")
        return provoke(home, capsys)

    return reset_and_provoke


ALL_MANIFESTS = "*/manifest.json"
# Of a function with several calls, each has its number.
CASES = {
    "unfinished": Case(
        ("lifecycle.mode.choose_action:2", "lifecycle.mode.choose_action:3"), training(), 2, trains=True
    ),
    "nothing to resume": Case(("lifecycle.mode.choose_action:1",), when_reset(training("--resume")), 1, trains=True),
    "unknown to a verb": Case(("lifecycle.mode.check_known",), verb("status", "nosuch"), 1),
    "unknown to a run": Case(("lifecycle.mode._make_or_correct:2",), training(name="nosuch"), 1),
    "misspelt": Case(("lifecycle.mode._make_or_correct:1",), training(name="tinny"), 1, code=3),
    "half of the settings": Case(("lifecycle.mode.check_settings_exist",), remove_half_of_the_settings, 1),
    "finished": Case(
        ("lifecycle.finished.finished_lines:1", "lifecycle.finished.finished_lines:2"),
        when_finished(training()),
        2,
        trains=True,
    ),
    "stopped": Case(
        ("tracking.startup_summary.next_line:3",), training("--resume", "--stop-after-epoch", "2"), 1, trains=True
    ),
    "just finished": Case(("tracking.startup_summary.next_line:2",), training("--resume"), 1),
    "tried": Case(
        ("tracking.startup_summary.next_line:1",), when_reset(training("--limit-batches", "1")), 1, trains=True
    ),
    "author's mistake": Case(("worker._remedies:4", "worker._remedies:5"), crash_in_author_code, 2, trains=True),
    "out of memory": Case(
        ("worker._remedies:1", "worker._remedies:2"),
        crash_in_the_pipeline(MemoryError("out of memory")),
        2,
        trains=True,
    ),
    "crash": Case(("worker._remedies:6",), crash_in_the_pipeline(RuntimeError("something else")), 1, trains=True),
    "first crash": Case(("worker._remedies:3",), crash_untrained, 1, trains=True),
    "interrupt": Case(("lifecycle.mode.how_to_continue",), crash_in_the_pipeline(KeyboardInterrupt()), 1, trains=True),
    "early interrupt": Case(("lifecycle.mode.describe_interrupt",), interrupt_untrained, 1, trains=True),
    "killed process": Case(("lifecycle.mode.how_to_continue",), end_a_process(-9), 1, trains=True),
    "silent process": Case(("lifecycle.mode.how_to_continue",), end_a_process(7), 1, trains=True),
    "frozen settings": Case(
        ("lifecycle.mode.read_frozen_contents",), training("--auto", "--set", "training.seed=9"), 1
    ),
    "no name": Case(("arguments._contradiction:1",), run_without_a_name, 1),
    "set with resume": Case(("arguments._contradiction:2",), training("--resume", "--set", "training.seed=9"), 1),
    "other data": Case(("experiment.dataset_fingerprints.refuse_changed_datasets",), change_data, 1),
    "no commit": Case(("store.store._recover",), when_damaged(ALL_MANIFESTS, training("--resume")), 1, code=1),
    "unreadable commit": Case(
        ("store.weight_pools.newest_commit",), when_damaged(ALL_MANIFESTS, verb("evaluate", "tiny")), 1, code=1
    ),
    "damaged pool": Case(
        ("store.weight_pools._damage",),
        when_damaged("*/module_ckps/*/trunk.pt", verb("evaluate", "tiny", "--pool", "last")),
        1,
        code=1,
    ),
    "damage found": Case(
        ("commands.fsck._lines:1",), when_damaged("6/manifest.json", verb("fsck", "tiny")), 1, trains=True
    ),
    "damage of a finished one": Case(
        ("commands.fsck._lines:2",),
        when_finished(when_damaged("*/module_ckps/last/trunk.pt", verb("fsck", "tiny"))),
        1,
        trains=True,
    ),
    "new": Case(("commands.new.execute:2",), verb("new", "example_2"), 1, trains=True),
    # The stubs are still to be filled in.
    "stubs": Case(("commands.new.execute:1",), verb("new", "example_3", "--empty"), 1, code=2),
    "no experiments": Case(("commands.status.execute",), when_empty(verb("status")), 1),
    "no output kept": Case(("commands.logs._choose_files",), verb("logs", "tiny", "--rank", "0"), 1, trains=True),
    "launched": Case(("commands.launch.execute",), launch_in_background, 1),
    "submitted": Case(("commands.slurm._submit",), submit_to_slurm, 1),
    "several numbers of processes": Case(
        ("commands.verify_resume._refuse_without_exact",),
        verb("verify-resume", "tiny", "--nproc", "1,2", "--steps", "2", "--kills", "1"),
        1,
        trains=True,
    ),
}
# Provoked by tests of their own below.
ELSEWHERE = {
    "store.lock._describe_use:1",
    "store.lock._describe_use:2",
    "launch.torchrun_command.start_in_background:1",
    "launch.torchrun_command.start_in_background:2",
    "commands.stop.execute",
    "commands.stop._kill_all:1",
    # In tests/runs/test_hosting.py and test_nan.py.
    "commands.stop._kill_all:2",
    "loop._report_skipped:1",
    "loop._report_skipped:2",
    "loop._report_skipped:3",
    "loop._report_skipped:4",
    # Only pass on what their callers say.
    "command_lines.run_line",
    # In tests/runs/test_adapters.py.
    "experiment.initial_weights._load",
    "lifecycle.starts.line_like_last_start",
}
BUILDERS = ("run_line", "verb_line", "line_like_last_start")


def call_sites() -> set[str]:
    """Return every call in the pipeline that builds a command: its function, and its number there if it has several."""
    sites = set()
    for path in (ROOT / "pipeline").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "pipeline").with_suffix("").parts)
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                count = sum(isinstance(name, ast.Name) and name.id in BUILDERS for name in called)
                numbers = [""] if count == 1 else [f":{number}" for number in range(1, count + 1)]
                sites |= {f"{module}.{function.name}{number}" for number in numbers}
    return sites


def test_every_command_is_tried() -> None:
    """A message with a command that no case of this file provokes does not pass."""
    assert call_sites() == {site for case in CASES.values() for site in case.sites} | ELSEWHERE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if case.trains else []) for name, case in CASES.items()]
)
def test_printed_commands_work(name: str, begun: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Each command that a message prints runs as it is printed, on the experiment that it speaks of."""
    case = CASES[name]
    monkeypatch.chdir(ROOT)
    text = case.provoke(begun, capsys)
    commands = commands_of(text)
    assert len(commands) == case.num_commands, text
    for line in commands:
        result = paste(line)
        assert result.returncode == case.code, f"{line}\n{result.stdout}{result.stderr}"


def test_command_that_stops_a_run_of_another_host_works(
    begun: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run elsewhere cannot be killed from here, and the verb that asks it to stop is named."""
    monkeypatch.chdir(ROOT)
    asked = threading.Event()
    with held(ExperimentPaths(begun, "tiny"), asked.wait):
        with monkeypatch.context() as patch:
            patch.setattr("pipeline.commands.stop.socket.gethostname", lambda: "another")
            text = said_by(lambda: call(begun, "stop", "tiny", "--now"), capsys)
        (line,) = commands_of(text)
        stopped = paste(line)
        asked.set()
    assert "asked to stop after the current step" in stopped.stdout, text + stopped.stderr


LONG = """
    from pipeline.components import WeightedLossEarlyStopper

    early_stopper = WeightedLossEarlyStopper(max_epochs=100_000)
"""


@pytest.mark.slow
def test_commands_about_a_live_run_work(launching_home: Path, monkeypatch: Any, capsys: Any) -> None:
    """A launch names the verbs that follow and stop it, a second start those that look at it and stop it."""
    home = launching_home
    write_experiment(home, files={"pymodules/early_stopper.py": LONG})
    monkeypatch.chdir(ROOT)
    follow, stop_launched = commands_of(said_by(lambda: call(home, "run", "tiny", "--detach"), capsys))
    state_file = home / "experiment_results" / "tiny" / "state.json"
    limit = time.monotonic() + SECONDS
    while not state_file.exists():
        assert time.monotonic() < limit
        time.sleep(0.1)
    # Following ends with the run only.
    assert paste(follow.replace(" -f", "")).returncode == 0
    status, stop = commands_of(said_by_run(home, "--auto"))
    assert stop == stop_launched
    assert paste(status).returncode == 0
    stopped = paste(f"{stop} --wait")
    assert stopped.returncode == 0, stopped.stderr
    (continuing,) = commands_of(stopped.stdout)
    assert paste(f"{continuing} --stop-after-epoch 0").returncode == 0


@pytest.mark.parametrize(
    "words", [["torchrun", "--nproc-per-node=1", "training_pipeline.py"], ["training-pipeline", "train"]]
)
def test_command_names_the_way_a_run_was_launched(words: list[str], home: Path) -> None:
    """Programs that the shell finds are named as they were typed, and only then."""
    folder = Path(sys.executable).parent
    found = {"PATH": f"{folder}:{os.environ['PATH']}"}
    line = shlex.join([*words, "tiny", "--data-home", str(home)])
    stopped = paste(f"{line} --stop-after-epoch 1", env=found)
    (following,) = commands_of((stopped.stdout + stopped.stderr).split("next:")[1])
    assert sorted(shlex.split(following)) == sorted([*shlex.split(line), "--resume"])
    program = str(folder.relative_to(ROOT) / words[0])
    elsewhere = paste(shlex.join([program, *words[1:], "tiny", "--data-home", str(home)]))
    assert f"to continue:    {program} " in elsewhere.stdout + elsewhere.stderr


def test_command_names_the_run_verb(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that the run verb has started names that verb, with its options and the flags of the run behind them."""
    monkeypatch.chdir(ROOT)
    stopped = paste(f"{sys.executable} -m pipeline run tiny --nproc 1 --data-home {home} -- --stop-after-epoch 0")
    (line,) = commands_of((stopped.stdout + stopped.stderr).split("next:")[1])
    assert line.endswith(f"training-pipeline run tiny --nproc 1 --data-home {home} -- --resume")
    assert paste(line).returncode == 0


@pytest.mark.slow
def test_commands_repeat_the_device(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A run that leaves the accelerators alone leaves them alone when it is continued, whoever names the command."""
    monkeypatch.chdir(ROOT)
    line = f"{sys.executable} -m pipeline run tiny --nproc 2 --data-home {home} -- --device=cpu --stop-after-epoch 0"
    first = paste(line)
    (following,) = commands_of((first.stdout + first.stderr).split("next:")[1])
    refused = paste(line)
    assert refused.returncode in (0, 3), refused.stderr
    damage(home, "1/manifest.json")
    (named,) = commands_of(said_by(lambda: call(home, "fsck", "tiny"), capsys))
    for command in (following, named):
        assert f"training-pipeline run tiny --nproc 2 --data-home {home} -- --resume --device cpu" in command
    assert paste(f"{following} --stop-after-epoch 1").returncode == 0


@pytest.mark.slow
def test_refusal_of_a_verb_names_its_own_options(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Obeying what run and train print keeps the number of processes."""
    monkeypatch.chdir(ROOT)
    for asked in ("run tiny --nproc 2", "train tiny --nproc 2"):
        refused = paste(f"{sys.executable} -m pipeline {asked} --data-home {begun}")
        assert refused.returncode == 3
        first, second = commands_of(refused.stdout + refused.stderr)
        assert f"training-pipeline {asked} " in first
        assert f"training-pipeline {asked} " in second
    assert paste(f"{first} --stop-after-epoch 2").returncode == 0


def test_checkout_that_is_not_installed_is_found_from_elsewhere(home: Path, tmp_path: Path) -> None:
    """From another folder, a verb's line says where the package is."""
    source = tmp_path / "checkout"
    shutil.copytree(ROOT / "pipeline", source / "pipeline")
    shutil.copytree(ROOT / "example_settings", source / "example_settings")
    shutil.copy(ROOT / "training_pipeline.py", source)
    refused = paste(f"{sys.executable} {source / 'training_pipeline.py'} nosuch --data-home {home}", home)
    (line,) = commands_of(refused.stderr)
    assert line.startswith(f"PYTHONPATH={source} ")
    made = paste(line, home)
    assert made.returncode == 0, made.stderr
    (next_line,) = commands_of(made.stdout)
    assert next_line.startswith(f"PYTHONPATH={source} ")
    assert paste(f"{next_line} --stop-after-epoch 0", home).returncode == 0
