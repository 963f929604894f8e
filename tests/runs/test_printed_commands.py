"""Every command that a message prints is provoked here, pasted into a shell as it stands, and works."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.commands import slurm
from pipeline.distributed.processes import Processes
from pipeline.paths import ExperimentPaths
from pipeline.worker import conclude_failure
from tests.support.experiments import write_experiment
from tests.support.running import SECONDS, end_launched, environment, run_inside, run_process
from tests.support.verbs import call

ROOT = Path(__file__).parents[2]
# From the first word of a command to the end of its line, without a remark behind four spaces.
COMMAND = re.compile(
    r"(?:PYTHONPATH=\S+ )?[^\s:;]*(?:python3?|torchrun|training-pipeline) (?:.*?)(?=    \(|$)", re.MULTILINE
)
PLACEHOLDERS = {"VARIANT": "variant_1", "NAME": "name_1", "EXAMPLE": "example_1"}


def commands_of(text: str) -> list[str]:
    """Return the commands that a message prints, with names in place of the words that stand for one."""
    lines = []
    for line in COMMAND.findall(text):
        if "-m pipeline" in line or "training_pipeline" in line or "training-pipeline" in line:
            for word, name in PLACEHOLDERS.items():
                line = re.sub(rf"\b{word}\b", name, line)
            lines.append(line.strip())
    return lines


def paste(line: str, folder: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a line in a shell, as someone who copies it does."""
    return subprocess.run(
        line, shell=True, cwd=folder, env=environment(env), capture_output=True, text=True, timeout=SECONDS, check=False
    )


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
    """A message: which functions build its commands, how it comes about, how many it has and how they end."""

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
CASES = {
    "unfinished": Case(("lifecycle.mode.choose_action",), training(), 2, trains=True),
    "nothing to resume": Case(("lifecycle.mode.choose_action",), when_reset(training("--resume")), 1, trains=True),
    "unknown to a verb": Case(("lifecycle.mode.check_known",), verb("status", "nosuch"), 1),
    "unknown to a run": Case(("lifecycle.mode._make_or_correct",), training(name="nosuch"), 1),
    "misspelt": Case(("lifecycle.mode._make_or_correct",), training(name="tinny"), 1, code=3),
    "half of the settings": Case(("lifecycle.mode.check_settings_exist",), remove_half_of_the_settings, 1),
    "finished": Case(("lifecycle.finished.finished_lines",), when_finished(training()), 2, trains=True),
    "stopped": Case(
        ("tracking.startup_summary.next_line",), training("--resume", "--stop-after-epoch", "2"), 1, trains=True
    ),
    "just finished": Case(("tracking.startup_summary.next_line",), training("--resume"), 1),
    "author's mistake": Case(("worker._remedies",), crash_in_author_code, 2, trains=True),
    "out of memory": Case(("worker._remedies",), crash_in_the_pipeline(MemoryError("out of memory")), 2, trains=True),
    "crash": Case(("worker._remedies",), crash_in_the_pipeline(RuntimeError("something else")), 1, trains=True),
    "interrupt": Case(("worker._how_to_continue",), crash_in_the_pipeline(KeyboardInterrupt()), 1, trains=True),
    "frozen settings": Case(("run._read_frozen_contents",), training("--auto", "--set", "training.seed=9"), 1),
    "no name": Case(("arguments._contradiction",), run_without_a_name, 1),
    "set with resume": Case(("arguments._contradiction",), training("--resume", "--set", "training.seed=9"), 1),
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
        ("commands.fsck._lines",), when_damaged("6/manifest.json", verb("fsck", "tiny")), 1, trains=True
    ),
    "damage of a finished one": Case(
        ("commands.fsck._lines",),
        when_finished(when_damaged("*/module_ckps/last/trunk.pt", verb("fsck", "tiny"))),
        1,
        trains=True,
    ),
    "new": Case(("commands.new.execute",), verb("new", "example_2"), 1, trains=True),
    "no experiments": Case(("commands.status.execute",), when_empty(verb("status")), 1),
    "no output kept": Case(("commands.logs._choose_files",), verb("logs", "tiny", "--rank", "0"), 1, trains=True),
    "launched": Case(("commands.launch.execute",), launch_in_background, 1),
    "submitted": Case(("commands.slurm._submit",), submit_to_slurm, 1),
}
# Provoked by tests of their own below.
ELSEWHERE = {
    "store.lock._describe_use",
    "commands.stop.execute",
    "command_lines.run_line",
    "launch.hosted_agent._conclude",
    # In tests/runs/test_adapters.py, test_nan.py and test_hosting.py.
    "experiment.initial_weights._load",
    "loop._report_skipped",
    "commands.stop._kill_all",
    "launch.torchrun_command.start_in_background",
}


def call_sites() -> set[str]:
    """Return every function of the pipeline that builds a command."""
    sites = set()
    for path in (ROOT / "pipeline").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "pipeline").with_suffix("").parts)
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(isinstance(called, ast.Name) and called.id in ("run_line", "verb_line") for called in calls):
                    sites.add(f"{module}.{function.name}")
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
    assert f"next: {line} --resume" in stopped.stdout + stopped.stderr
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
