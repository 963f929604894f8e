"""The console command: a run that it hosts speaks last, and its exit codes are those of the run itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.monitoring.experiment_state import read_overview
from pipeline.paths import ExperimentPaths
from pipeline.store.compare import first_difference
from pipeline.verbs import VERBS
from tests.support.experiments import FILES, write_experiment
from tests.support.printed import commands_of, paste
from tests.support.running import SECONDS, BackgroundRun, command, environment, run_process
from tests.support.verbs import call

ROOT = Path(__file__).parents[2]
RESULTS = Path("experiment_results/tiny")
PYENV = Path.home() / ".pyenv/versions"
# One rank of a run does what a variable says in its third training batch.
FAILING = FILES["pymodules/module_transforms/a.py"].replace(
    "outputs = modules",
    """if modules["trunk"].training and os.environ.get("RANK", "0") == os.environ.get("FAILING_RANK"):
                    self.num_batches.append(1)
                    if len(self.num_batches) == 3:
                        if "SIGNAL" in os.environ:
                            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
                        raise ValueError("boom")
                time.sleep(float(os.environ.get("SECONDS_OF_A_BATCH", "0.03")))
                outputs = modules""",
)
FILES_THAT_FAIL: dict[str, str | None] = {
    "pymodules/module_transforms/a.py": FAILING.replace(
        "from pipeline.components", "import os\n        import time\n\n        from pipeline.components", 1
    ).replace('register = "loss_a"\n', 'register = "loss_a"\n            num_batches = []\n', 1)
}


class HostedRun(BackgroundRun):
    """A run under the verb ``train`` instead of torchrun."""

    def __init__(self, home: Path, *words: str, nproc: int = 2, env: dict[str, str] | None = None) -> None:
        super().__init__(home, f"--nproc={nproc}", *words, env=env, launcher=("train",))


def hosted(home: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "training_pipeline.py"), "train", "tiny", "--nproc=2"]
    return subprocess.run(
        [*line, "--data-home", str(home), *words],
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def is_prepared(home: Path) -> bool:
    """Return whether a run has begun, so that interrupts are requests."""
    try:
        progress = json.loads((home / RESULTS / "state.json").read_text())["progress"]
    except FileNotFoundError:
        return False
    return progress["stage"] == "training" and progress["epoch"] >= 1


def is_training(home: Path) -> bool:
    try:
        progress = json.loads((home / RESULTS / "state.json").read_text())["progress"]
    except FileNotFoundError:
        return False
    return progress["stage"] == "training" and progress["epoch"] >= 1 and progress["step"] > 0


@pytest.fixture
def slow_home(tmp_path: Path) -> Path:
    """A data home whose experiment takes its time, and fails where it is asked to."""
    write_experiment(tmp_path, files=FILES_THAT_FAIL, training={"checkpoint_every_steps": 1})
    return tmp_path


@pytest.mark.slow
def test_hosted_run_has_the_bits_of_torchrun(tmp_path: Path) -> None:
    """Hosted or under torchrun, stopped in one and continued in the other: the same files."""
    for name in ("hosted", "torchrun"):
        write_experiment(tmp_path / name)
    done = hosted(tmp_path / "hosted", "--stop-after-epoch", "2")
    assert done.returncode == 0, done.stdout
    assert "train tiny --nproc 2 " in done.stdout.splitlines()[-1]
    assert run_process(tmp_path / "hosted", "--resume", nproc=2).returncode == 0
    assert run_process(tmp_path / "torchrun", nproc=2).returncode == 0
    data = RESULTS / "data"
    assert first_difference(tmp_path / "hosted" / data, tmp_path / "torchrun" / data) is None
    # As with torchrun, the output of the other ranks is in files.
    logs = tmp_path / "hosted/experiment_logs/tiny/torchrun"
    assert [path.parent.name for path in logs.rglob("stdout.log")] == ["1"]


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP))],
)
def test_signal_ends_with_zero_and_our_own_last_line(slow_home: Path, number: int) -> None:
    """Ctrl+C, SIGTERM and a closed terminal stop with a commit; nothing is printed below the last block."""
    with HostedRun(slow_home) as run:
        run.wait_for(lambda: is_training(slow_home))
        run.process.send_signal(number)
        assert run.wait() == 0, run.text()
        assert not run.left_alive()
    assert "next: " in run.text().splitlines()[-1]
    assert "Traceback" not in run.text()
    assert f"({signal.Signals(number).name})" in run.text()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["hosted", "alone"])
def test_second_interrupt_ends_at_once(slow_home: Path, launcher: str) -> None:
    """Pressed twice, Ctrl+C does not wait for the step: one sentence, the command that continues, and exit code 130."""
    slow = {"SECONDS_OF_A_BATCH": "1.5"}
    words = ("--nproc=2",) if launcher == "hosted" else ()
    with BackgroundRun(slow_home, *words, env=slow, launcher=("train",) if words else ()) as run:
        run.wait_for(lambda: is_prepared(slow_home))
        time.sleep(0.5)
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.text()
        assert not run.left_alive()
    assert "Traceback" not in run.text()
    assert "Ended because" not in run.text()
    *_, sentence, following = run.text().splitlines()
    assert sentence == "Interrupted. The last commit is intact."
    assert run.text().count("Interrupted") == 1
    (command_line,) = commands_of(following)
    assert ("train tiny --nproc 2" in command_line) == bool(words)
    # Nothing has failed: somebody did not want to wait.
    assert read_overview(ExperimentPaths(slow_home, "tiny")).ended.outcome == "stopped"
    assert paste(f"{command_line} --stop-after-epoch 0", Path.cwd()).returncode == 0


@pytest.mark.parametrize(
    ("launcher", "seconds"),
    [
        ("hosted", 2.0),
        *(pytest.param("hosted", number, marks=pytest.mark.slow) for number in (0.7, 3.5)),
        ("alone", 0.7),
        *(pytest.param("alone", number, marks=pytest.mark.slow) for number in (1.5, 2.5)),
        *(pytest.param("one process", number, marks=pytest.mark.slow) for number in (0.7, 1.5)),
        *(pytest.param("run", number, marks=pytest.mark.slow) for number in (0.7, 2.5, 4.5)),
    ],
)
def test_interrupt_while_it_starts_is_no_traceback(slow_home: Path, launcher: str, seconds: float) -> None:
    """torch takes seconds to import, in the launcher and in its processes; Ctrl+C is understood at any of them."""
    verb = {"hosted": ("train", "--nproc=2"), "alone": (), "one process": ("train",), "run": ("run", "--nproc=2")}
    start = verb[launcher]
    with BackgroundRun(slow_home, *start[1:], launcher=start[:1]) as run:
        time.sleep(seconds)
        run.process.send_signal(signal.SIGINT)
        code = run.wait()
        assert not run.left_alive()
    # A fast machine may have come to its first step, and then stops cleanly.
    assert code in (0, 130), run.text()
    assert "Traceback" not in run.text()
    assert "Interrupted" in run.text() or "stopped at" in run.text()


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_crash_of_any_rank_is_the_last_on_screen(slow_home: Path, rank: str) -> None:
    """The author's own frames, what to do and the exit code 1, whichever rank it was; said once."""
    done = hosted(slow_home, env={"FAILING_RANK": rank})
    assert done.returncode == 1
    tail = done.stdout.split(f"rank {rank} failed:")
    assert len(tail) == 2, done.stdout
    assert "ValueError: boom" in tail[1]
    assert "train.log" in tail[1].splitlines()[-1] or rank == "0"
    assert "ChildFailedError" not in done.stdout
    assert "torch/distributed" not in done.stdout


@pytest.mark.parametrize(
    ("rank", "number"), [("1", signal.SIGKILL), pytest.param("0", signal.SIGSEGV, marks=pytest.mark.slow)]
)
def test_rank_that_a_signal_has_ended_is_named(slow_home: Path, rank: str, number: int) -> None:
    """A killed or crashed process cannot speak; the command that continues is printed for it."""
    done = hosted(slow_home, env={"FAILING_RANK": rank, "SIGNAL": str(int(number))})
    assert done.returncode == 128 + number, done.stdout
    assert f"rank {rank} was ended by {signal.Signals(number).name}." in done.stdout
    assert "train tiny --nproc 2" in done.stdout.splitlines()[-1]
    assert " --auto " in done.stdout.splitlines()[-1]


def test_refusals_keep_their_exit_codes(slow_home: Path) -> None:
    """2 for an invalid experiment, 3 for a conflict; one message, and nothing below it."""
    refused = hosted(slow_home, "--resume")
    assert refused.returncode == 3
    assert refused.stdout.count("no results to resume") == 1
    assert "--auto in place of --resume" in refused.stdout.splitlines()[-1]
    (slow_home / "experiment_settings/tiny/settings/training.json").write_text('{"sed": 1}')
    invalid = hosted(slow_home)
    assert invalid.returncode == 2
    assert "Did you mean 'seed'?" in invalid.stdout
    assert "Traceback" not in invalid.stdout


@pytest.mark.slow
def test_killed_launcher_takes_its_processes_along(slow_home: Path) -> None:
    """They notice within seconds, commit and leave; the next start continues to the bits of a run left alone."""
    with HostedRun(slow_home) as run:
        run.wait_for(lambda: is_training(slow_home))
        os.kill(run.process.pid, signal.SIGKILL)
        assert not run.left_alive(), run.text()
    assert hosted(slow_home, "--auto").returncode == 0
    write_experiment(slow_home / "alone", files=FILES_THAT_FAIL, training={"checkpoint_every_steps": 1})
    assert hosted(slow_home / "alone").returncode == 0
    assert first_difference(slow_home / RESULTS / "data", slow_home / "alone" / RESULTS / "data") is None


def console(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    line = [str(Path(sys.executable).parent / "training-pipeline"), *words]
    return subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_pipeline_of_the_users_own_shadows_nothing(tmp_path: Path) -> None:
    """A file pipeline.py in the current folder is neither imported nor in the way, with one process or two."""
    write_experiment(tmp_path)
    (tmp_path / "pipeline.py").write_text("raise SystemExit('the wrong file')\n")
    checked = console(["check", "tiny"], tmp_path)
    assert checked.returncode == 0, checked.stderr
    trained = console(["train", "tiny", "--nproc", "2", "--stop-after-epoch", "1"], tmp_path)
    assert trained.returncode == 0, trained.stderr
    line = [sys.executable, "-m", "training_pipeline", "tiny", "--resume", "--stop-after-epoch", "2"]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    launched = console(["run", "tiny", "--nproc", "2", "--", "--resume"], tmp_path)
    assert launched.returncode == 0, launched.stderr


def test_console_command_has_a_version_and_knows_its_verbs(tmp_path: Path) -> None:
    """--version, --help, a misspelt verb, an experiment named like a verb, and an experiment without any verb."""
    assert console(["--version"], tmp_path).stdout == "training-pipeline 0.2.0\n"
    shown = console(["--help"], tmp_path).stdout
    assert all(f"    {verb}" in shown for verb in VERBS)
    misspelt = console(["chek", "tiny"], tmp_path)
    assert misspelt.returncode == 2
    assert "Did you mean 'check'?" in misspelt.stderr
    assert console(["new", "status"], tmp_path).returncode == 2
    write_experiment(tmp_path)
    assert console(["tiny", "--stop-after-epoch", "0"], tmp_path).returncode == 0


def test_missing_torch_is_a_sentence(tmp_path: Path) -> None:
    """A Python without the packages, or one that is too old, says what to do instead of a traceback."""
    entry = ROOT / "training_pipeline.py"
    code = f"__file__ = {str(entry)!r}; __name__ = '__main__'; exec(open(__file__).read())"
    bare = [sys.executable, "-S", "-c", code, "status"]
    done = subprocess.run(bare, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "has no torch, numpy, jsonschema, filelock, tqdm" in done.stderr
    assert "fix: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not list(PYENV.glob("3.[89].*")), reason="needs a Python that is too old")
def test_old_python_is_a_sentence(tmp_path: Path) -> None:
    """Versions that cannot run the code can still say so."""
    for python in sorted(PYENV.glob("3.[89].*/bin/python")):
        for words in (["training_pipeline.py", "tiny"], ["-m", "pipeline", "status"]):
            done = subprocess.run([python, *words], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 2, done.stderr
            assert "Python 3.10 or newer is needed" in done.stderr
            assert "Traceback" not in done.stderr


def completed(shell: str, line: str, folder: Path) -> str:
    """Return what a shell offers for the last word of a line."""
    program = Path(sys.executable).parent / "training-pipeline"
    words = line.split(" ")
    if shell == "fish":
        script = f"{program} completion fish | source; complete -C {line!r}"
    else:
        array = " ".join(repr(word) for word in words)
        script = f"source <({program} completion {shell}); COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; "
        script += '_training_pipeline; printf "%s\\n" "${COMPREPLY[@]}"'
    shell_line = [shell, "-c", script]
    return subprocess.run(shell_line, cwd=folder, env=environment(), stdout=-1, text=True, check=True).stdout


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_shell_completes_verbs_options_and_names(home: Path, shell: str) -> None:
    """Verbs in the first place, options behind dashes, else the experiments of the data home."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert "status" in completed(shell, "training-pipeline sta", home)
    assert "--resume" in completed(shell, "training-pipeline train --res", home)
    assert "tiny" in completed(shell, "training-pipeline train t", home)


def test_completion_of_zsh_is_that_of_bash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """zsh reads the same function with its emulation of bash, and accepts the script."""
    assert call(tmp_path, "completion", "bash") == 0
    bash = capsys.readouterr().out
    assert call(tmp_path, "completion", "zsh") == 0
    zsh = capsys.readouterr().out
    assert zsh.endswith(bash)
    assert "bashcompinit" in zsh
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=zsh, text=True, check=True)


def test_hosted_command_line_is_that_of_the_tests(tmp_path: Path) -> None:
    """The support code starts what it says: the entry, the verb, the experiment."""
    assert command(tmp_path, launcher=("train",))[1:3] == [str(ROOT / "training_pipeline.py"), "train"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["hosted", "torchrun", "alone"])
def test_stop_now_kills_all_of_a_run(slow_home: Path, launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Launcher, ranks and loader workers are gone at once; the next start continues from the last commit."""
    nproc = 2 if launcher == "torchrun" else None
    start = ("train", "--nproc=2") if launcher == "hosted" else ()
    with BackgroundRun(slow_home, *start[1:], nproc=nproc, launcher=start[:1]) as run:
        run.wait_for(lambda: is_training(slow_home))
        assert call(slow_home, "stop", "tiny", "--now") == 0
        said = capsys.readouterr().out
        assert "tiny: killed; the last commit counts" in said
        assert not run.left_alive(5)
    assert "stopped at" not in run.text()
    assert call(slow_home, "stop", "tiny", "--now") == 3
    (line,) = commands_of(said)
    ways = {"hosted": "train tiny --nproc 2", "torchrun": "--nproc-per-node=2", "alone": "training_pipeline.py"}
    assert ways[launcher] in line
    assert paste(line, Path.cwd()).returncode == 0
