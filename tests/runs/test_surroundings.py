"""What the world around a run does to it: edited files, clocks, links, closed terminals, odd environments."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from pipeline.errors import InvalidExperiment, PipelineError, UsageError
from pipeline.store.compare import first_difference
from tests.support.experiments import tree, write_experiment
from tests.support.running import command, environment, run_inside, run_process

RESULTS = Path("experiment_results/tiny")
WHOLE = Path("experiment_results/whole")
WITH_VECTOR_UNITS = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has one kind of kernels only on this CPU"
)


@pytest.fixture
def begun(home: Path) -> Path:
    """The tiny experiment stands after epoch 1; beside it the same one has run undisturbed."""
    write_experiment(home, "whole")
    run_inside(home, name="whole")
    run_inside(home, "--stop-after-epoch", "1")
    return home


def check_same(home: Path) -> None:
    assert first_difference(home / RESULTS / "data", home / WHOLE / "data") is None


def test_edited_settings_do_not_reach_a_running_experiment(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files edited, added or deleted after the start are named in one warning; the run keeps its copy."""
    settings = begun / "experiment_settings/tiny"
    (settings / "settings/training.json").write_text('{"seed": 99}')
    (settings / "pymodules/modules/trunk.py").unlink()
    assert run_inside(begun, "--resume").is_finished
    output = capsys.readouterr().out
    assert (
        output.count("the run continues with its frozen copy: pymodules/modules/trunk.py, settings/training.json") == 1
    )
    check_same(begun)


def test_deleted_settings_folder_does_not_matter(begun: Path) -> None:
    """Results are self-contained: without any settings folder the run goes on."""
    (begun / "experiment_settings/tiny").rename(begun / "gone")
    assert run_inside(begun, "--resume").is_finished
    check_same(begun)


@pytest.mark.parametrize("file", ["settings/training.json", "pymodules/modules/trunk.py"])
def test_edited_copy_is_refused_unless_accepted(begun: Path, file: str) -> None:
    """A frozen file that was edited is named with exit code 2 and nothing changes; a flag accepts it."""
    with (begun / RESULTS / file).open("a") as copy:
        copy.write("\n")
    before = tree(begun)
    with pytest.raises(InvalidExperiment, match=rf"{file}: the frozen copy was edited") as refusal:
        run_inside(begun, "--resume")
    assert refusal.value.exit_code == 2
    assert tree(begun) == before
    assert run_inside(begun, "--resume", "--accept-edited-copy").is_finished
    check_same(begun)


def test_clock_that_jumps_has_no_effect(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock set back by a day and files of the same age change nothing: nothing is ordered by time."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 86400)
    for path in (begun / RESULTS).rglob("*"):
        os.utime(path, (1, 1))
    assert run_inside(begun, "--resume").is_finished
    check_same(begun)


def test_foreign_files_and_listing_order_have_no_effect(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Editors' files are ignored, and folders listed in another order give the same bits."""
    write_experiment(home, "whole")
    run_inside(home, name="whole")
    for name in (".trunk.py.swp", "trunk.py~", "__pycache__/trunk.cpython-311.pyc", "#trunk.py#"):
        path = home / "experiment_settings/tiny/pymodules/modules" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\0")
    listed = os.scandir

    class Backwards:
        def __init__(self, path: str) -> None:
            with listed(path) as entries:
                self._entries = sorted(entries, key=lambda entry: entry.name, reverse=True)
            self._iterator = iter(self._entries)

        def __iter__(self) -> object:
            return iter(self._entries)

        def __next__(self) -> object:
            return next(self._iterator)

        def __enter__(self) -> object:
            return self

        def __exit__(self, *exception: object) -> None:
            return None

        def close(self) -> None:
            return None

    monkeypatch.setattr(os, "scandir", Backwards)
    run_inside(home)
    monkeypatch.undo()
    check_same(home)


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONHASHSEED": "123", "LC_ALL": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu"},
        {"HOME": "/nonexistent", "TMPDIR": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent"},
    ],
)
def test_odd_environment_gives_the_same_bits(begun: Path, variables: dict[str, str]) -> None:
    """Hash seed, language, time zone, no home and no temporary folder have no effect."""
    done = run_process(begun, "--resume", env=variables)
    assert done.returncode == 0, done.stderr
    check_same(begun)


def test_strict_umask_works_and_keeps_files_private(begun: Path) -> None:
    """With umask 077 the run works and what it writes is readable by its owner alone."""
    line = command(begun, "--resume")
    assert subprocess.run(line, env=environment(), umask=0o077, check=False, capture_output=True).returncode == 0
    assert (begun / RESULTS / "state.json").stat().st_mode & 0o077 == 0
    check_same(begun)


def test_number_of_threads_is_recorded_and_a_change_is_told(begun: Path) -> None:
    """Another number of threads may give other bits: the log says so and the starts record it."""
    done = run_process(begun, "--resume", env={"OMP_NUM_THREADS": "2"})
    assert "threads" in done.stdout
    assert "bits may differ" in done.stdout
    starts = [json.loads(line) for line in (begun / RESULTS / "starts.jsonl").read_text().splitlines()]
    assert starts[1]["threads"] == 2


@WITH_VECTOR_UNITS
def test_other_vector_units_void_the_claim_for_good(begun: Path) -> None:
    """Each resume with other vector units warns with both values and the first step; "bit-exact" never comes back."""
    first, other = torch.backends.cpu.get_cpu_capability(), {"ATEN_CPU_CAPABILITY": "default"}
    limited = run_process(begun, "--resume", "--stop-after-epoch", "2", env=other)
    assert limited.stdout.count("Changed since the last start") == 1
    change = f"cpu_capabilities {first} → DEFAULT"
    warning = f"WARNING - Changed since the last start: {change}. Training continues; from epoch 2, step 1 on, bits may"
    assert warning in limited.stdout
    doubt = f"resume: not bit-exact: {change} (first start → %s); bits may differ from epoch 2, step 1 on"
    assert doubt % "now" in limited.stdout
    back = run_process(begun, "--resume")
    assert back.returncode == 0
    assert f"Changed since the last start: cpu_capabilities DEFAULT → {first}." in back.stdout
    assert doubt % "start 2" in back.stdout
    assert "resume: bit-exact" not in limited.stdout + back.stdout
    assert first_difference(begun / RESULTS / "data", begun / WHOLE / "data") is not None


def test_same_surroundings_keep_the_claim(begun: Path) -> None:
    """The control of the test above: nothing changed, nothing is warned of, and the bits are the same."""
    done = run_process(begun, "--resume")
    assert "resume: bit-exact with 1 process × 1 thread; otherwise equal up to rounding" in done.stdout
    assert "Changed since the last start" not in done.stdout
    check_same(begun)


# Read by each process when it starts, before torch: the second of two has other vector units than the first.
_UNEQUAL_RANKS = """
import os

if os.environ.get("RANK") == "1":
    os.environ["ATEN_CPU_CAPABILITY"] = "default"
"""


@WITH_VECTOR_UNITS
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_unequal_ranks_are_refused_or_warned_of(home: Path, tmp_path: Path, reduction: str) -> None:
    """With exact nothing is written; with fast the run continues and claims nothing."""
    # Initial weights are drawn by vector units too, and differ by rounding.
    repair = {"on_rank_difference": "broadcast"} if reduction == "fast" else {}
    write_experiment(home, training={"gradient_reduction": reduction, **repair})
    (tmp_path / "path").mkdir()
    (tmp_path / "path/sitecustomize.py").write_text(_UNEQUAL_RANKS)
    before = tree(home)
    done = run_process(home, "--stop-after-epoch", "0", nproc=2, env={"PYTHONPATH": str(tmp_path / "path")})
    values = f"{torch.backends.cpu.get_cpu_capability()} on rank 0 and DEFAULT on rank 1"
    if reduction == "exact":
        assert done.stderr.count(f"exact needs the same cpu_capability on every rank, but it is {values}") == 1
        assert tree(home) == before
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"WARNING - Ranks are unequal: cpu_capability is {values}.") == 1
        assert f"resume: not bit-exact: cpu_capabilities {values} (now)" in done.stdout


def test_provenance_of_each_start_is_kept(begun: Path) -> None:
    """Each start adds a line with command, time, host, world size, versions and git state."""
    run_inside(begun, "--resume")
    starts = [json.loads(line) for line in (begun / RESULTS / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 2
    names = "command time host world_size backend devices cpus cpu_capabilities torch numpy python git_commit git_dirty"
    assert set(names.split()) <= set(starts[0])


def test_closed_output_and_unwritable_logs_do_not_stop_training(begun: Path) -> None:
    """With stdout and stderr closed and a file in place of the log folder, training ends as ever."""
    logs = begun / "experiment_logs/tiny"
    logs.rename(begun / "old_logs")
    logs.write_text("in the way")
    shell = f"exec {' '.join(command(begun, '--resume'))} >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], env=environment(), check=False).returncode == 0
    check_same(begun)


def test_reader_of_the_output_that_goes_away_does_not_stop_training(begun: Path) -> None:
    """A pipe that nobody reads any more changes nothing."""
    shell = f"{' '.join(command(begun, '--resume'))} | head -n 1"
    subprocess.run(["sh", "-c", shell], env=environment(), check=False, capture_output=True)
    check_same(begun)


@pytest.mark.parametrize("name", ["..", "/", "a/../../b", "", ".", "x" * 300, "a\nb", "-rf", "ａ", ".hidden"])
@pytest.mark.parametrize("words", [(), ("--reset",)])
def test_unsafe_names_touch_nothing(home: Path, name: str, words: tuple[str, ...]) -> None:
    """Names that could lead anywhere else are refused with exit code 2 before a path is built."""
    (home / "canary").write_text("alive")
    before = tree(home)
    with pytest.raises(SystemExit) as refusal:
        run_inside(home, *words, name=name)
    assert refusal.value.code == 2
    assert tree(home) == before


def test_linked_results_are_refused_and_never_followed(begun: Path) -> None:
    """A link in place of the results folder is refused, also by --reset; what it leads to survives."""
    elsewhere = begun / "elsewhere"
    (begun / RESULTS).rename(elsewhere)
    (begun / RESULTS).symlink_to(elsewhere)
    before = tree(elsewhere)
    for word in ("--resume", "--reset"):
        with pytest.raises(UsageError, match="must be a folder, but is a link"):
            run_inside(begun, word)
    assert tree(elsewhere) == before


@pytest.mark.parametrize("kind", ["outside", "dangling", "loop", "fifo"])
def test_unsafe_files_in_settings_are_refused(home: Path, kind: str) -> None:
    """Links that leave the folder or lead nowhere, and pipes, are refused without a hang, disk untouched."""
    path = home / "experiment_settings/tiny/pymodules/utils/odd.bin"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"outside": "/etc/hostname", "dangling": "nowhere", "loop": path}[kind])
    with pytest.raises(InvalidExperiment, match=r"odd\.bin: must "):
        run_inside(home)
    assert not (home / RESULTS).exists()


def test_links_inside_the_settings_are_copied_as_files(home: Path) -> None:
    """A link to a file of the same experiment is fine, and its copy stands alone."""
    link = home / "experiment_settings/tiny/pymodules/utils/more.py"
    link.symlink_to("points.py")
    run_inside(home, "--stop-after-epoch", "0")
    copy = home / RESULTS / "pymodules/utils/more.py"
    assert copy.read_bytes() == link.read_bytes()
    assert not copy.is_symlink()


def test_foreign_results_folder_is_not_ours_to_use(home: Path) -> None:
    """A results folder that someone else filled is neither used nor reset."""
    (home / RESULTS).mkdir(parents=True)
    (home / RESULTS / "thesis.tex").write_text("precious")
    for words in ((), ("--reset",), ("--auto",)):
        with pytest.raises(UsageError, match=r"made by this program.*thesis\.tex"):
            run_inside(home, *words)
    assert (home / RESULTS / "thesis.tex").read_text() == "precious"


def test_experiment_inside_another_is_refused(begun: Path) -> None:
    """A group and an experiment cannot share a name: resetting one would delete the other."""
    write_experiment(begun, "tiny/inner")
    with pytest.raises(UsageError, match=r"'tiny/inner' must not lie inside an experiment"):
        run_inside(begun, name="tiny/inner")


def test_experiment_below_a_group_cannot_look_like_results(tmp_path: Path) -> None:
    """A name such as 'group/data' is refused: starting 'group' would take it for its own."""
    with pytest.raises(SystemExit) as refusal:
        run_inside(tmp_path, name="group/data")
    assert refusal.value.code == 2


def test_damaged_list_of_starts_does_not_block(begun: Path) -> None:
    """A list of starts that cannot be read is kept as it is, and the run goes on."""
    with (begun / RESULTS / "starts.jsonl").open("a") as starts:
        starts.write('{"torn')
    assert run_inside(begun, "--resume").is_finished
    assert '{\\"torn' in (begun / RESULTS / "starts.jsonl").read_text()


def test_damaged_record_of_the_latest_epoch_falls_back(begun: Path) -> None:
    """A flipped bit in the records a resume reads makes it go on from the commit before, to the same end."""
    path = begun / RESULTS / "data/loss_reg_data/train/loss_a/step_data_1.npz"
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    assert run_inside(begun, "--resume").is_finished
    check_same(begun)


def test_files_read_late_come_from_the_copy(home: Path) -> None:
    """What a module reads or imports after the start is the frozen copy, already in the first run."""
    late = """
        from pathlib import Path

        from pipeline.components import WeightedLossEarlyStopper


        class Stopper(WeightedLossEarlyStopper):
            def update(self, losses, loss_weighter):
                from .utils import late

                assert "experiment_results" in late.__file__
                assert "experiment_results" in __file__
                super().update(losses, loss_weighter)


        early_stopper = Stopper(max_epochs=1)
    """
    write_experiment(home, files={"pymodules/early_stopper.py": late, "pymodules/utils/late.py": "value = 1\n"})
    assert run_inside(home).is_finished


def test_empty_folders_do_not_pile_up(home: Path) -> None:
    """Components that save nothing leave no folder behind in any commit."""
    text = "from pipeline.components import UniformLossWeighter\n\nloss_weighter = UniformLossWeighter()\n"
    write_experiment(home, files={"pymodules/loss_weighter.py": text})
    run_inside(home)
    folders = [path for path in (home / RESULTS / "generations").rglob("*") if path.is_dir()]
    assert all(any(folder.iterdir()) for folder in folders)


def test_grouped_names_work(tmp_path: Path) -> None:
    """Experiments may be grouped by slashes."""
    write_experiment(tmp_path, "group/one")
    assert run_inside(tmp_path, "--stop-after-epoch", "0", name="group/one").epoch == 1


def test_results_that_cannot_be_written_are_refused_at_the_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unwritable data home ends the run before any training, and says which folder it is."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PipelineError, match="is not writable"):
        run_inside(home)
    assert not (home / RESULTS).exists()
