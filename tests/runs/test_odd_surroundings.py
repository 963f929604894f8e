"""Things in places where nobody expects them: special files, full devices, odd names, foreign files."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import DamagedResults, InvalidExperiment, PipelineError, UsageError
from pipeline.store.compare import first_difference
from tests.support.experiments import tree, write_experiment
from tests.support.running import command, environment, run_inside, run_process

RESULTS = Path("experiment_results/tiny")
LOGS = Path("experiment_logs/tiny")
GIGABYTE = 1 << 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of an experiment that ran undisturbed, which no test changes."""
    home = tmp_path_factory.mktemp("whole")
    write_experiment(home)
    run_inside(home)
    return home / RESULTS / "data"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        # The name of a socket must be short.
        before = Path.cwd()
        os.chdir(path.parent)
        server.bind(path.name)
        os.chdir(before)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def loop(path: Path) -> None:
    path.symlink_to(path)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, GIGABYTE)


Put = Callable[[Path], None]
SPECIAL = [pipe, socket_file, device, folder, dangling, loop]


@pytest.mark.parametrize("put", [*SPECIAL, huge])
def test_special_file_in_place_of_settings_is_refused(home: Path, put: Put) -> None:
    """Whatever stands where a settings file should be, the file is named with exit code 2 and nothing hangs."""
    path = home / "experiment_settings/tiny/settings/logging.json"
    path.unlink()
    put(path)
    with pytest.raises(InvalidExperiment, match=rf"{path.name}: must "):
        run_inside(home)
    assert not (home / RESULTS).exists()


@pytest.mark.parametrize("put", [pipe, socket_file, device, dangling, loop])
@pytest.mark.parametrize("name", ["modules/trunk.py", "utils/more.bin", "early_stopper.py"])
def test_special_file_among_pymodules_is_refused(home: Path, put: Put, name: str) -> None:
    """The same holds for the Python files and what lies beside them."""
    path = home / "experiment_settings/tiny/pymodules" / name
    path.unlink(missing_ok=True)
    put(path)
    with pytest.raises(InvalidExperiment, match=rf"{path.name}: must "):
        run_inside(home)
    assert not (home / RESULTS).exists()


def test_loop_of_folders_is_refused(home: Path) -> None:
    """A link to a folder above would make the tree endless."""
    (home / "experiment_settings/tiny/pymodules/utils/up").symlink_to("..")
    with pytest.raises(InvalidExperiment, match="up: must be a regular file"):
        run_inside(home)


def test_linked_settings_folder_is_used(home: Path, whole: Path) -> None:
    """The settings folder itself may be a link, for example into a repository; what is inside stays inside."""
    settings = home / "experiment_settings/tiny"
    settings.rename(home / "elsewhere")
    settings.symlink_to(home / "elsewhere")
    run_inside(home)
    assert first_difference(home / RESULTS / "data", whole) is None


@pytest.mark.parametrize("put", [pipe, device, dangling])
def test_special_file_added_to_the_settings_does_not_stop_a_resume(
    begun: Path, whole: Path, put: Put, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the start the settings folder is only compared: what is odd in it is named and ignored."""
    put(begun / "experiment_settings/tiny/pymodules/utils/odd.bin")
    assert run_inside(begun, "--resume").is_finished
    assert "the run continues with its frozen copy: pymodules/utils/odd.bin" in capsys.readouterr().out
    assert first_difference(begun / RESULTS / "data", whole) is None


@pytest.mark.parametrize("put", [*SPECIAL, huge])
def test_special_file_in_place_of_the_state_falls_back(begun: Path, whole: Path, put: Put) -> None:
    """A state file that is none is as good as damaged: the newest commit is used."""
    (begun / RESULTS / "state.json").unlink()
    put(begun / RESULTS / "state.json")
    if put is folder:
        # A file cannot be renamed onto a folder; that is told at the first commit.
        with pytest.raises(PipelineError, match=r"state\.json"):
            run_inside(begun, "--resume")
        return
    assert run_inside(begun, "--resume").is_finished
    assert first_difference(begun / RESULTS / "data", whole) is None


@pytest.mark.parametrize("put", [*SPECIAL, huge])
def test_special_file_in_place_of_a_manifest_falls_back(begun: Path, whole: Path, put: Put) -> None:
    """The same holds for the manifest of the newest commit: the one before is used."""
    newest = max((begun / RESULTS / "generations").glob("*/manifest.json"), key=lambda path: int(path.parent.name))
    newest.unlink()
    put(newest)
    assert run_inside(begun, "--resume").is_finished
    assert first_difference(begun / RESULTS / "data", whole) is None


@pytest.mark.parametrize("put", [pipe, socket_file, device, dangling])
def test_special_file_in_place_of_our_notes_does_not_matter(begun: Path, whole: Path, put: Put) -> None:
    """What only tells people something is replaced or ignored, and the run ends as ever."""
    (begun / RESULTS / "status.json").unlink(missing_ok=True)
    put(begun / RESULTS / "status.json")
    assert run_inside(begun, "--resume").is_finished
    assert first_difference(begun / RESULTS / "data", whole) is None


@pytest.mark.parametrize("put", [pipe, device])
def test_special_file_in_place_of_committed_weights_falls_back(begun: Path, whole: Path, put: Put) -> None:
    """A pipe or a device in place of a committed file is damage, and is never opened."""
    newest = max((begun / RESULTS / "generations").glob("*/optim_ckps/trunk.pt"), key=lambda path: int(path.parts[-3]))
    for path in (newest, begun / RESULTS / "data/optim_ckps/trunk.pt"):
        path.unlink()
        put(path)
    assert run_inside(begun, "--resume").is_finished
    assert first_difference(begun / RESULTS / "data", whole) is None


@pytest.mark.parametrize("put", [folder, dangling, loop, device])
def test_special_file_in_place_of_the_lock_is_told(begun: Path, put: Put) -> None:
    """A lock that is no file is never followed or removed by us; the message says what to do."""
    (begun / RESULTS / "run.lock").unlink()
    put(begun / RESULTS / "run.lock")
    for word in ("--resume", "--reset"):
        with pytest.raises(PipelineError, match=r"run\.lock must be a file"):
            run_inside(begun, word)


@pytest.mark.parametrize("name", [RESULTS / ".status.json.new", LOGS / "train.log"])
def test_pipe_where_we_write_does_not_hang(begun: Path, whole: Path, name: Path) -> None:
    """A pipe without a reader in place of the status or the log is replaced or left alone."""
    (begun / name).unlink(missing_ok=True)
    pipe(begun / name)
    assert run_inside(begun, "--resume").is_finished
    assert first_difference(begun / RESULTS / "data", whole) is None


def test_link_in_place_of_the_next_status_is_not_followed(begun: Path) -> None:
    """What a planted link leads to is not overwritten."""
    (begun / "precious").write_text("alive")
    (begun / RESULTS / ".status.json.new").symlink_to(begun / "precious")
    run_inside(begun, "--resume")
    assert (begun / "precious").read_text() == "alive"


def test_reset_spares_what_links_lead_to(begun: Path) -> None:
    """Links that someone has put inside results or logs are removed, never what they lead to."""
    precious = begun / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("alive")
    for place in (RESULTS / "data/link", RESULTS / "generations/link", LOGS / "link"):
        (begun / place).symlink_to(precious)
    assert run_inside(begun, "--reset", "--stop-after-epoch", "0").epoch == 1
    assert (precious / "thesis.tex").read_text() == "alive"
    assert not (begun / LOGS / "link").is_symlink()


def test_linked_logs_are_not_reset(begun: Path) -> None:
    """A log folder that is a link could lead anywhere: a reset refuses it and deletes nothing."""
    (begun / LOGS).rename(begun / "elsewhere")
    (begun / LOGS).symlink_to(begun / "elsewhere")
    before = tree(begun)
    with pytest.raises(UsageError, match="must be a folder, but is a link"):
        run_inside(begun, "--reset")
    assert tree(begun) == before


@pytest.mark.parametrize("place", ["experiment_results", "experiment_settings"])
def test_file_of_the_experiments_name_is_refused(tmp_path: Path, place: str) -> None:
    """A file where the experiment's folder should be is told, also to --reset, and stays."""
    write_experiment(tmp_path, "other")
    if place == "experiment_results":
        write_experiment(tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "tiny").write_text("precious")
    for words in ((), ("--reset",), ("--auto",)):
        with pytest.raises(UsageError):
            run_inside(tmp_path, *words)
    assert (tmp_path / place / "tiny").read_text() == "precious"


def test_longest_name_works_to_the_end(tmp_path: Path) -> None:
    """A name of the allowed length fits every file system, with all that we add to it."""
    name = "n" * 200
    write_experiment(tmp_path, name)
    for word in ("--auto", "--reset"):
        assert run_inside(tmp_path, word, "--stop-after-epoch", "0", name=name).epoch == 1


@pytest.mark.parametrize("stream", ["1", "2"])
def test_full_output_does_not_stop_training(begun: Path, whole: Path, stream: str) -> None:
    """With stdout or stderr on a full device the run ends as ever, with exit code 0."""
    shell = f"exec {' '.join(command(begun, '--resume'))} {stream}>/dev/full"
    assert subprocess.run(["sh", "-c", shell], env=environment(), check=False, capture_output=True).returncode == 0
    assert first_difference(begun / RESULTS / "data", whole) is None


def test_full_disk_under_the_logs_does_not_stop_training(begun: Path, whole: Path) -> None:
    """A log file that takes no more bytes changes nothing."""
    (begun / LOGS / "train.log").unlink()
    (begun / LOGS / "train.log").symlink_to("/dev/full")
    assert run_inside(begun, "--resume").is_finished
    assert first_difference(begun / RESULTS / "data", whole) is None


def test_progress_bar_on_a_full_output_does_not_stop_training(home: Path, whole: Path) -> None:
    """Also where a bar is drawn, a full device changes nothing."""
    write_experiment(home, logging={"progress_bar": {"enabled": True}})
    shell = f"exec {' '.join(command(home))} >/dev/full 2>&1"
    assert subprocess.run(["sh", "-c", shell], env=environment(), check=False).returncode == 0
    assert first_difference(home / RESULTS / "data", whole) is None


@pytest.mark.skipif(Path("/dev/shm").stat().st_dev == Path("/tmp").stat().st_dev, reason="needs another device")
def test_temporary_folder_on_another_device_is_not_used(tmp_path: Path, whole: Path) -> None:
    """Temporary files lie beside their targets, wherever TMPDIR leads, and nothing is left there."""
    write_experiment(tmp_path)
    elsewhere = Path(f"/dev/shm/{tmp_path.name}_{os.getpid()}")
    elsewhere.mkdir()
    try:
        done = run_process(tmp_path, env={"TMPDIR": str(elsewhere)})
        assert done.returncode == 0, done.stderr
        assert list(elsewhere.iterdir()) == []
    finally:
        shutil.rmtree(elsewhere)
    assert first_difference(tmp_path / RESULTS / "data", whole) is None


def test_no_home_and_no_locale_work(tmp_path: Path, whole: Path) -> None:
    """A container's bare environment, without HOME, language or terminal, is enough."""
    write_experiment(tmp_path)
    bare = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(command(tmp_path), env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert first_difference(tmp_path / RESULTS / "data", whole) is None


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_any_umask_works(tmp_path: Path, whole: Path, umask: int) -> None:
    """What we write we can replace and remove again, even where new files are read-only to their owner."""
    write_experiment(tmp_path)
    before = os.umask(umask)
    try:
        run_inside(tmp_path, "--stop-after-epoch", "1")
        run_inside(tmp_path, "--resume")
    finally:
        os.umask(before)
    assert first_difference(tmp_path / RESULTS / "data", whole) is None


def test_sticky_folders_work(tmp_path: Path, whole: Path) -> None:
    """A data home like /tmp, open to all but sticky, is as good as any."""
    write_experiment(tmp_path)
    tmp_path.chmod(0o1777)
    (tmp_path / "experiment_results").mkdir(mode=0o1777)
    run_inside(tmp_path, "--stop-after-epoch", "1")
    run_inside(tmp_path, "--reset")
    assert first_difference(tmp_path / RESULTS / "data", whole) is None


@pytest.mark.parametrize("place", ["data", "data/module_ckps/last", "generations", "temp_data", "pymodules", "."])
def test_foreign_files_in_the_results_have_no_effect(begun: Path, whole: Path, place: str) -> None:
    """What editors and file managers leave in the results changes neither the run nor its outcome."""
    names = [".DS_Store", ".trunk.pt.swp", "trunk.pt~", "__pycache__/x.pyc", "#x#"]
    for name in names:
        path = begun / RESULTS / place / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\0")
    assert run_inside(begun, "--resume").is_finished
    for name in names:
        (begun / RESULTS / "data" / name).unlink(missing_ok=True)
        (begun / RESULTS / "data/module_ckps/last" / name).unlink(missing_ok=True)
    assert first_difference(begun / RESULTS / "data", whole) is None


@pytest.mark.parametrize("text", ["import sys\nsys.exit(0)\n", "raise SystemExit\n", "exit()\n"])
def test_exit_while_importing_is_no_success(home: Path, text: str) -> None:
    """A pymodule that leaves with success while it is imported is an invalid experiment, told with its line."""
    write_experiment(home, files={"pymodules/modules/trunk.py": text})
    with pytest.raises(InvalidExperiment, match=r"trunk\.py:\d+: must be importable, but calls sys\.exit"):
        run_inside(home)
    assert not (home / RESULTS).exists()


def test_exit_while_importing_ends_with_code_two(home: Path) -> None:
    """The process itself says so as well."""
    write_experiment(home, files={"pymodules/modules/trunk.py": "import sys\nsys.exit(0)\n"})
    done = run_process(home)
    assert done.returncode == 2
    assert "trunk.py:2" in done.stderr
    assert "Traceback" not in done.stderr


def test_damaged_everything_is_refused_and_left(begun: Path) -> None:
    """With every manifest replaced by a pipe nothing hangs and nothing is deleted."""
    for manifest in (begun / RESULTS / "generations").glob("*/manifest.json"):
        manifest.unlink()
        pipe(manifest)
    before = tree(begun / RESULTS / "generations")
    with pytest.raises(DamagedResults, match="No intact commit"):
        run_inside(begun, "--resume")
    assert tree(begun / RESULTS / "generations") == before
