"""The whole run on one page: look → decide → assemble → open → prepare or restore → loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path

import torch

from pipeline.arguments import AUTO, RESET, RESUME, Arguments
from pipeline.checkpoint.committed_files import CommittedFiles, CommitToRead, committed_files
from pipeline.checkpoint.parts import PersistedParts, is_counted, restore_counters
from pipeline.distributed.hardware import compare_hardware
from pipeline.distributed.processes import Processes
from pipeline.errors import DamagedResults, InvalidExperiment, Problem, StateConflict, UnreadableFile
from pipeline.experiment.assembly import Experiment, assemble, count, read_checked_contents
from pipeline.experiment.dataset_fingerprints import Fingerprints, fingerprint_everywhere, refuse_changed_datasets
from pipeline.experiment.initial_weights import load_initial_weights, rebuild_modules
from pipeline.experiment.pymodules.loader import relocate
from pipeline.experiment.settings.settings import (
    Contents,
    parse_settings,
    read_contents,
    register_contents,
)
from pipeline.experiment.sharding import mesh_of
from pipeline.lifecycle.finished import finish_pending, finished_lines
from pipeline.lifecycle.frozen_copy import copy_folder, differing_files, digest_folder, refuse_edited_copy
from pipeline.lifecycle.mode import (
    RESTART,
    check_is_try,
    check_settings_exist,
    choose_action,
    inspect_results,
    read_frozen_contents,
)
from pipeline.lifecycle.provenance import describe_start, was_started_before
from pipeline.lifecycle.reset import check_shared, check_writable, open_fresh, reset
from pipeline.lifecycle.starts import compare_starts, read_starts, record_start
from pipeline.loop import Loop
from pipeline.monitoring.journal import END, START
from pipeline.paths import ExperimentPaths
from pipeline.progress import Progress
from pipeline.report.ending import conclude_run
from pipeline.report.page import leave_report
from pipeline.session import TrainingSession, build_session
from pipeline.store.lock import RunLock
from pipeline.store.store import ResultsStore, read_current_manifest
from pipeline.system.disk import Disk
from pipeline.system.logging import LOGGER, start_console, start_file
from pipeline.system.seeding import set_deterministic
from pipeline.tracking.factory import check_installed, create_trackers, publish_rest, tracked_run
from pipeline.tracking.publisher import Publisher
from pipeline.tracking.startup_summary import WARNING_MARK, change_lines, first_block, last_block, next_line, step_lines

_SECONDS_BETWEEN_KEEP_ALIVES = 20
Watch = Callable[[TrainingSession], None]


def run(arguments: Arguments, processes: Processes, disk: Disk | None = None, watch: Watch | None = None) -> Progress:
    """Run an experiment as far as it goes and return where it stands; ``watch`` may put an observer into its stages."""
    disk = disk or Disk()
    paths = arguments.paths
    start_console(paths.name, is_rank_zero=processes.is_rank_zero)
    if arguments.limit_batches is not None:
        processes.on_rank_zero(check_is_try, paths)
    situation = processes.on_rank_zero(inspect_results, paths)
    if was_started_before(paths, processes):
        # The processes before this restart have done what was asked; this one continues.
        arguments = replace(arguments, mode=AUTO)
    if situation.is_finished and arguments.mode != RESET:
        if arguments.all_overrides:
            processes.on_rank_zero(read_frozen_contents, paths, arguments)
        processes.on_rank_zero(_settle, paths, disk)
        return situation.progress or Progress()
    action = processes.on_rank_zero(choose_action, arguments, paths, situation)
    return _Run(arguments, paths, processes, disk, watch).execute(action)


def _settle(paths: ExperimentPaths, disk: Disk) -> None:
    """Complete what a kill after the last commit has left undone, and say that the experiment is finished."""
    finish_pending(paths, disk, PersistedParts.is_needed, partial(publish_rest, paths))
    for line in finished_lines(paths):
        LOGGER.info(line)


class _Run:
    """One start of an experiment, fresh or continued."""

    def __init__(
        self, arguments: Arguments, paths: ExperimentPaths, processes: Processes, disk: Disk, watch: Watch | None
    ) -> None:
        self._arguments = arguments
        self._paths = paths
        self._processes = processes
        self._disk = disk
        self._watch = watch
        self._lock = RunLock(paths, disk)
        self._store = ResultsStore(paths, disk, self._lock.claim)
        self._started = time.monotonic()
        # Known before there is a log file to write it to.
        self._hardware_warning = ""

    def execute(self, action: str) -> Progress:
        """Begin or continue, loop, and give the lock back however it ends."""
        try:
            if self._processes.world_size > 1:
                check_shared(self._paths, self._processes, self._disk)
            if action == RESUME:
                session = self._continue()
                progress = self._restore(session)
            else:
                session = self._begin(action)
                progress = Progress()
                self._count(session)
            self._introduce(session, progress)
            with conclude_run(self._paths, session.journal, session.close):
                publisher = self._new_publisher(session, progress)
                loop = Loop(session, publisher)
                session.stop_requests.listen()
                if progress.is_fresh:
                    progress = self._prepare(session, loop, progress)
                return self._loop(session, loop, publisher, progress)
        finally:
            self._lock.release()

    def _begin(self, action: str) -> TrainingSession:
        """Check everything, and only then write: a refusal leaves the disk as it was."""
        folder = self._paths.settings
        self._processes.on_rank_zero(check_settings_exist, self._paths)
        sources = self._processes.on_all_ranks(digest_folder, folder)
        if any(other != sources for other in self._processes.gather(sources)):
            what = "must be the same on every process, but differs between them: the data home must be shared"
            raise InvalidExperiment([Problem(str(folder), what)]).shared()
        contents = self._processes.on_all_ranks(read_checked_contents, folder, self._arguments.all_overrides)
        experiment = self._assemble(folder, contents)
        # The frozen copy says what was assumed, too.
        contents["loss_registers"] = register_contents(experiment.settings.loss_registers)
        training = experiment.settings.training
        pymodules = folder / "pymodules"
        self._processes.on_all_ranks(load_initial_weights, experiment.components, self._paths, pymodules, training)
        session = build_session(self._paths, self._processes, experiment, self._store)
        session.ranks.compare("before the first step", is_start=True)
        session.engine.prepare()
        fingerprints = fingerprint_everywhere(experiment, self._processes)
        written = read_contents(folder / "settings")
        changed = {name: content for name, content in contents.items() if content != written[name]}
        # From here on there is something on disk.
        self._processes.on_rank_zero(self._open, action, sources, changed)
        self._store.set_fingerprints(fingerprints)
        # Code that is imported from now on, and tracebacks, come from the frozen copy.
        relocate(folder / "pymodules", self._paths.results / "pymodules")
        return session

    def _open(self, action: str, sources: dict[str, str], changed: Contents) -> None:
        """Make the results folder, with the frozen copy in it."""
        check_writable(self._paths)
        if action == RESTART:
            LOGGER.info("Nothing was trained yet: the settings folder was changed since, so this starts again with it.")
        if action in (RESET, RESTART):
            reset(self._paths, self._disk, only_untrained=action == RESTART)
        open_fresh(self._paths, self._disk, self._lock)
        copies = copy_folder(self._paths.settings, self._paths.results, sources, changed, self._disk)
        self._store.set_digests(copies, sources)

    def _count(self, session: TrainingSession) -> None:
        """Let rank zero count, which may take long."""
        if self._processes.is_rank_zero:
            last_broadcast = time.monotonic()
            for _ in count(session.experiment):
                # A broadcast now and then, so that the others do not take rank zero for dead.
                if time.monotonic() - last_broadcast > _SECONDS_BETWEEN_KEEP_ALIVES:
                    last_broadcast = time.monotonic()
                    self._processes.broadcast(False)
        while not self._processes.broadcast(True):
            continue

    def _continue(self) -> TrainingSession:
        """Load the frozen copy, then take the lock and bring the directory into order."""
        self._processes.on_rank_zero(self._check_copy)
        contents = self._processes.on_all_ranks(read_frozen_contents, self._paths, self._arguments)
        starts = self._processes.on_rank_zero(read_starts, self._paths)
        threads = [start["threads"] for start in starts if type(start.get("threads")) is int]
        if threads and parse_settings(contents).training.is_exact:
            # Bits depend on the number of threads, whatever the environment says now.
            torch.set_num_threads(threads[-1])
        experiment = self._assemble(self._paths.results, contents)
        self._processes.on_all_ranks(self._rebuild, experiment)
        session = build_session(self._paths, self._processes, experiment, self._store)
        fingerprints = fingerprint_everywhere(experiment, self._processes)
        self._processes.on_rank_zero(self._recover, fingerprints)
        return session

    def _rebuild(self, experiment: Experiment) -> None:
        """Load what commits leave out from where it came from; the restore compares it with what it was."""
        modules = experiment.components.modules
        rebuilt = [name for name, definition in modules.items() if definition.saves_trained_only]
        training = experiment.settings.training
        rebuild_modules(modules, rebuilt, self._paths, self._paths.results / "pymodules", training)

    def _check_copy(self) -> None:
        manifest = read_current_manifest(self._paths)
        if manifest:
            refuse_edited_copy(self._paths.results, manifest.copies, is_accepted=self._arguments.accept_edited_copy)

    def _recover(self, fingerprints: Fingerprints) -> None:
        """Take the lock, and make the newest intact commit the current one."""
        self._lock.acquire()
        # Asked again: another run may have ended or reset the experiment before the lock was ours.
        situation = inspect_results(self._paths)
        if not situation.exists:
            raise StateConflict(f"Experiment {self._paths.name!r} was just reset by another run.")
        if situation.is_finished:
            raise StateConflict(f"Experiment {self._paths.name!r} was just finished by another run.")
        self._store.recover(PersistedParts.is_needed)
        refuse_changed_datasets(self._paths, self._store.current.fingerprints, fingerprints)
        self._store.set_fingerprints(fingerprints)
        if self._arguments.accept_edited_copy:
            self._store.set_digests(digest_folder(self._paths.results), self._store.current.sources)
        edited = differing_files(self._paths.settings, self._store.current.sources)
        if edited:
            LOGGER.warning(
                "The settings folder has changed since the start; the run continues with its frozen copy: %s. "
                "To use the changes, start again with --reset, or run a copy of the folder under another name.",
                ", ".join(edited),
            )

    def _restore(self, session: TrainingSession) -> Progress:
        """Bring every part back to what was committed; return where the run continues."""
        commit = self._processes.on_rank_zero(self._commit_to_read, PersistedParts.is_needed)
        progress = commit.manifest.progress
        self._processes.on_all_ranks(session.parts.prepare_tensors, commit.manifest.run_state)
        with committed_files(self._paths, self._processes, commit) as files:
            self._processes.on_all_ranks(self._load, session, files, progress)
        session.parts.load_run_values(commit.manifest.run_state)
        session.ranks.compare("after the last commit was restored", saves=True)
        session.engine.prepare()
        return progress

    def _commit_to_read(self, is_needed: Callable[[str], bool]) -> CommitToRead:
        return CommitToRead(self._store.current, self._store.files_to_restore(is_needed), self._lock.claim.folder)

    def _load(self, session: TrainingSession, files: CommittedFiles, progress: Progress) -> None:
        try:
            session.parts.restore(files, progress)
        except UnreadableFile as error:
            # Copies are gone when the message is read; the names in data/ stay.
            named = str(error).replace(str(files.folder), str(self._paths.data))
            raise DamagedResults(f"{named}\n  fix: restore it from a backup, or start again with --reset.") from error

    def _assemble(self, folder: Path, contents: Contents) -> Experiment:
        settings = parse_settings(contents)
        device = self._processes.device
        # Before any module is built: kernels and threads decide about the bits of initial weights, too.
        if settings.training.uses_deterministic_kernels(device.type):
            set_deterministic()
        if settings.training.threads:
            torch.set_num_threads(settings.training.threads)
        self._hardware_warning = compare_hardware(self._processes, is_exact=settings.training.is_exact)
        torch.autograd.set_detect_anomaly(self._arguments.detect_anomaly)
        self._processes.on_all_ranks(check_installed, settings.logging, folder / "settings" / "logging.json")
        mesh = mesh_of(self._processes, settings.training)
        pymodules = folder / "pymodules"
        # Breakpoints and tracebacks of a resumed run name the author's own file while the copy is identical to it.
        original = None if folder == self._paths.settings else self._paths.settings / "pymodules"
        return self._processes.on_all_ranks(
            assemble, pymodules, settings, device, mesh, self._processes.world_size, original
        )

    def _introduce(self, session: TrainingSession, progress: Progress) -> None:
        """Open the log, record this start and log what is about to happen."""
        start = describe_start(self._processes, progress, self._arguments.all_overrides)
        earlier = self._processes.on_rank_zero(read_starts, self._paths)
        session.journal.start = len(earlier) + 1
        if not self._processes.is_rank_zero:
            return
        try:
            # torchrun may put error files there; a run does not need the folder.
            self._paths.error_files.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            LOGGER.warning("%s cannot be made: %s. Training continues.", self._paths.error_files, error.strerror)
        start_file(self._paths.name, self._paths.log_file)
        record_start(self._paths, start, self._disk, self._lock.claim.folder)
        session.journal.note(START, at=progress.as_json())
        state = f"continues at {progress}, commit {self._store.current.generation}" if earlier else "new run"
        plan = session.training.plan
        is_exact = session.experiment.settings.training.is_exact
        conditions = compare_starts([*earlier, start], is_exact=is_exact)
        lines = [
            *first_block(self._paths, self._processes, session.experiment, state, conditions.doubt),
            *step_lines(plan, session.experiment, self._processes),
            *change_lines(conditions.changed, conditions.harmless, conditions.doubt, progress),
        ]
        if self._hardware_warning:
            lines.append(WARNING_MARK + self._hardware_warning)
        for line in lines:
            LOGGER.log(WARNING if line.startswith(WARNING_MARK) else INFO, line.removeprefix(WARNING_MARK))

    def _prepare(self, session: TrainingSession, loop: Loop, progress: Progress) -> Progress:
        """Commit what a fresh experiment begins with; return the place that follows."""
        following = progress.next()
        session.experiment.initialize_schedulers()
        session.parts.choose_constants()
        session.training.begin()
        loop.commit_prepared(following)
        session.commits.wait()
        # Every rank loads the committed counts, rank zero too: a run must see what a resumed one would see.
        commit = self._processes.on_rank_zero(self._commit_to_read, is_counted)
        with committed_files(self._paths, self._processes, commit) as files:
            restore_counters(session.experiment.components, files.folder)
        return following

    def _loop(self, session: TrainingSession, loop: Loop, publisher: Publisher, progress: Progress) -> Progress:
        """Train until the end or a stop, and conclude on rank zero."""
        session.experiment.create_module_transforms()
        if self._watch is not None:
            self._watch(session)
        progress = loop.run(progress, self._arguments.stop_after_epoch)
        session.commits.wait()
        if self._processes.is_rank_zero:
            self._conclude(session, loop, progress)
        publisher.close()
        # torchrun ends all ranks when one leaves: none may leave before rank zero has written everything.
        self._processes.barrier()
        return progress

    def _new_publisher(self, session: TrainingSession, progress: Progress) -> Publisher:
        plan = session.training.plan
        publisher = Publisher(session.records, plan.num_steps, self._paths, plan.max_steps)
        epoch = Loop.recorded_epoch(progress)
        experiment = session.experiment
        # An observed run must not appear in trackers.
        if self._processes.is_rank_zero and self._watch is None:
            trackers = create_trackers(experiment.settings.logging, experiment.components.trackers)
            publisher.begin(trackers, tracked_run(self._paths, experiment.settings), epoch)
        if not progress.is_fresh:
            publisher.resume(epoch)
        return publisher

    def _conclude(self, session: TrainingSession, loop: Loop, progress: Progress) -> None:
        """Write down how the run ended, leave its page, and log the last block."""
        outcome = "finished" if progress.is_finished else "stopped"
        loop.write_status(progress, state=outcome)
        asked_by = session.stop_requests.reason or "asked by another process"
        reason = "" if progress.is_finished else f" at {progress} ({asked_by})"
        session.journal.note(END, outcome=outcome, at=progress.as_json(), reason=session.stop_requests.reason)
        seconds = time.monotonic() - self._started
        report = leave_report(self._paths)
        for line in last_block(self._paths, f"{outcome}{reason}", seconds, session.best, report):
            LOGGER.info(line)
        LOGGER.info(next_line(self._paths, progress, self._arguments.overrides))
