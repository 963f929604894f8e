"""The loop of a run: stage → next → commit, until the early stopper ends it or someone asks to stop."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from pipeline.checkpoint.parts import Moment
from pipeline.command_lines import run_line, verb_line
from pipeline.errors import PipelineError
from pipeline.lifecycle.starts import reset_flags
from pipeline.monitoring.journal import EPOCH
from pipeline.progress import EVALUATION, TRAINING, Progress
from pipeline.session import TrainingSession
from pipeline.store.changes import Changes
from pipeline.system.accelerators import memory_in_mb
from pipeline.system.logging import LOGGER, log_detail, log_on_terminal
from pipeline.system.seeding import seed_generators
from pipeline.tracking.log_lines import epoch_line, shown_losses, shown_rates, step_line, val_line
from pipeline.tracking.progress_bar import ProgressBar
from pipeline.tracking.publisher import Publisher
from pipeline.tracking.startup_summary import latest_values
from pipeline.tracking.step_timer import Pace
from pipeline.training.step import StepReport, StepRequests

# What the policies decide after an epoch; the names are shown if ranks do not agree.
_IMPROVEMENT = "improvement() of early_stopper.py"
_STOP = "early_stop() of early_stopper.py"
_KEEPS = "save_checkpoints() of checkpoint_saver.py"
# The bar shows losses that all ranks must add up for it.
_MIN_STEPS_BETWEEN_SHOWN_LOSSES = 25


class Loop:
    """Runs stages from a committed place on; every commit names the place that follows."""

    def __init__(self, session: TrainingSession, publisher: Publisher) -> None:
        self._session = session
        self._publisher = publisher
        self._settings = session.experiment.settings
        self._components = session.experiment.components
        # Without evaluations, the policies judge every training epoch itself.
        self._has_evaluations = self._settings.training.evaluation_interval > 0
        limits = (self._settings.training.max_epochs, session.training.plan.last_epoch)
        # The last epoch that the settings allow, or the one in which max_steps is reached.
        self._limit = min((limit for limit in limits if limit is not None), default=None)
        self._committed_at = time.monotonic()
        self._pace = Pace()
        self._kept_pools: list[str] = []
        # What module transforms wrote at the latest evaluation, until it is committed.
        self._artifacts: dict[str, bytes] = {}
        # All ranks must know whether rank zero shows a bar: they add up what stands in it.
        shows_bar = self._settings.logging.progress_bar and sys.stderr.isatty()
        self._shows_bar = session.processes.broadcast(shows_bar)
        # The latest loss and rates, for the bar.
        self._shown = ""

    def run(self, progress: Progress, stop_after_epoch: int | None) -> Progress:
        """Return where the run ended: finished, or at the place from which it will continue."""
        session = self._session
        while not progress.is_finished:
            # Ranks must agree: one that stops alone would leave the others waiting in their next collective.
            if session.processes.any(session.stop_requests.asked(epoch_ends=progress.stage == TRAINING)):
                return progress
            if stop_after_epoch is not None and progress.stage == TRAINING and progress.epoch > stop_after_epoch:
                session.stop_requests.reason = f"epoch {stop_after_epoch} is complete"
                return progress
            following = self._train(progress) if progress.stage == TRAINING else self._evaluate(progress)
            has_stopped_inside = following == progress or following.step > 0
            if has_stopped_inside:
                return following
            progress = following
        return progress

    def _train(self, progress: Progress) -> Progress:
        """Train one epoch; return what follows, or the step at which all ranks agreed to stop."""
        session = self._session
        epoch = progress.epoch
        total = session.training.plan.steps_of(epoch)
        every = self._settings.training.checkpoint_every_steps
        if progress.step == 0:
            self._publisher.begin_epoch()
        if session.runners[0].starts_workers:
            # A forked worker would inherit the locks of the commit's thread, held for ever.
            session.commits.wait()
        self._pace.begin_epoch(progress.step)
        updates = self._settings.logging.train_updates
        with self._new_bar(self._title("epoch", epoch), total, progress.step, updates) as bar:
            for report in session.training.run(epoch, progress.step, self._requests):
                self._after_step(epoch, report)
                bar.advance(self._shown)
                is_due = report.outcome.commit or (every is not None and report.step % every == 0)
                # The last step is committed with its epoch.
                if report.step < total and (report.outcome.stop or is_due):
                    here = progress.at_step(report.step)
                    session.training.flush()
                    self._commit(Moment.IN_EPOCH, epoch, here)
                    if report.outcome.stop:
                        self._note_epoch("train", epoch)
                        return here
        if self._has_evaluations:
            # The last epoch, where the early stopper knows it, always has an evaluation.
            is_last = epoch == self._max_epochs
            is_evaluated = is_last or epoch % self._settings.training.evaluation_interval == 0
            following = progress.next(evaluate=is_evaluated)
        else:
            following = self._judge(progress)
            losses = shown_losses(session.records.losses, "train", self._weights(), total)
            log_on_terminal(epoch_line(self._title("epoch", epoch), losses, is_best=False))
        self._note_epoch("train", epoch)
        self._commit(Moment.AFTER_TRAINING, epoch, following)
        return following

    def _evaluate(self, progress: Progress) -> Progress:
        """Evaluate one epoch; return what follows, or the same place if all ranks agreed to stop."""
        session = self._session
        epoch = progress.epoch
        stage = session.evaluation
        if not self._has_evaluations:
            # Only epoch 0 comes here: there is nothing to judge before the first training epoch.
            following = progress.next()
            self._commit(Moment.NOT_EVALUATED, epoch, following)
            return following
        self.write_status(progress)
        # Averages may need training batches for their BatchNorm statistics.
        if any(runner.starts_workers for runner in session.runners):
            # As before training: a worker must not inherit the locks of the commit's thread.
            session.commits.wait()
        self._pace.begin_epoch(0)
        updates = self._settings.logging.eval_updates
        with self._new_bar(self._title("evaluation", epoch), stage.num_rounds, 0, updates) as bar:
            for has_stopped in stage.run(epoch, session.stop_requests.asked):
                if has_stopped:
                    return progress
                session.commits.poll()
                bar.advance()
        if session.processes.is_rank_zero:
            self._publisher.keep_images(epoch, partial(session.samples.take_images, epoch))
            self._artifacts = session.samples.take_artifacts(epoch)
        elif session.experiment.is_sharded:
            # No rank can run a sharded module alone.
            session.samples.take_images(epoch)
            session.samples.take_artifacts(epoch)
        following = self._judge(progress)
        self._note_epoch("val", epoch)
        losses = shown_losses(session.records.losses, "val", self._weights())
        log_detail(val_line(epoch, stage.num_rounds, losses))
        log_on_terminal(epoch_line(self._title("epoch", epoch), losses, is_best="best" in self._kept_pools))
        self._commit(Moment.AFTER_EVALUATION, epoch, following)
        return following

    def _judge(self, progress: Progress) -> Progress:
        """Ask the policies what the latest epoch means."""
        losses = self._session.records.losses
        weighter = self._components.loss_weighter
        stopper = self._components.early_stopper
        saver = self._components.checkpoint_saver
        seed_generators(self._settings.training.seed, "judge", progress.epoch)
        stopper.update(losses, weighter)
        saver.update(losses, weighter, stopper)
        decisions = self._session.ranks.agree(
            {
                _IMPROVEMENT: bool(stopper.improvement()),
                _KEEPS: bool(saver.save_checkpoints()),
                _STOP: bool(stopper.early_stop()) or progress.epoch == self._limit,
            },
            f"after epoch {progress.epoch}",
        )
        self._kept_pools = ["best"] if decisions[_IMPROVEMENT] else []
        if decisions[_KEEPS]:
            self._kept_pools.append(f"epoch_{progress.epoch}")
        if decisions[_IMPROVEMENT]:
            self._session.best = {"epoch": progress.epoch, "values": latest_values(losses, "val")}
        return progress.next(evaluate=False, stop=decisions[_STOP])

    def _requests(self) -> StepRequests:
        minutes = self._settings.training.checkpoint_every_minutes
        is_late = minutes is not None and time.monotonic() - self._committed_at >= 60 * minutes
        # Clocks differ between ranks, so only rank zero's decides when a commit is due.
        is_commit_due = self._session.processes.is_rank_zero and is_late
        return StepRequests(stop=self._session.stop_requests.asked(), commit=is_commit_due)

    def _after_step(self, epoch: int, report: StepReport) -> None:
        session = self._session
        # An error of the commit that is being written ends the run at the next step, not at the next commit.
        session.commits.poll()
        self._pace.add(report.step, report.seconds, report.data_seconds)
        if report.outcome.skipped or report.skipped_alone:
            self._report_skipped(epoch, report)
        every = self._settings.logging.every_steps
        is_logged = report.step % every == 0 or report.step == report.num_steps
        if self._shows_bar:
            bar_every = max(_MIN_STEPS_BETWEEN_SHOWN_LOSSES, report.num_steps // self._settings.logging.train_updates)
            if is_logged or report.step == 1 or report.step % bar_every == 0:
                session.training.flush()
                latest = shown_losses(session.records.losses, "train", self._weights(), 1)
                self._shown = f"loss {latest['loss']:.4g}, lr {shown_rates(session.experiment.learning_rates())}"
        if is_logged:
            session.training.flush()
            num_logged = (report.step - 1) % every + 1
            losses = shown_losses(session.records.losses, "train", self._weights(), num_logged)
            eta = self._eta_seconds(epoch, report.step)
            log_detail(step_line(epoch, report, session.experiment, session.processes.device, eta, losses))
        if session.processes.is_rank_zero and session.status.is_due():
            self.write_status(
                Progress(TRAINING, epoch, report.step),
                num_steps=report.num_steps,
                max_epochs=self._max_epochs,
                step_seconds=self._pace.step_seconds,
                eta=self._eta_seconds(epoch, report.step),
                epoch_eta=self._pace.seconds_for(report.num_steps - report.step),
                memory=memory_in_mb(session.processes.device),
            )

    def _eta_seconds(self, epoch: int, step: int) -> float:
        """Return the time until the end of the experiment if its last epoch is known, else of the epoch."""
        plan = self._session.training.plan
        last_epoch = max(epoch, self._max_epochs or epoch)
        return self._pace.seconds_for(plan.steps_through(last_epoch) - plan.steps_through(epoch - 1) - step)

    def _report_skipped(self, epoch: int, report: StepReport) -> None:
        """Warn of a skipped step, of several in a row once; end the run if there are too many."""
        session = self._session
        paths = session.paths
        num_skipped = session.training.num_consecutive_skipped
        if session.processes.is_rank_zero:
            replay = ["--epoch", str(epoch), "--step", str(report.step)]
            cause = report.cause or "a gradient is not finite"
            turn = f", the turn of {', '.join(report.skipped_alone)}" if report.skipped_alone else ""
            warning = f"Epoch {epoch}, step {report.step}{turn} skipped on all ranks: {cause}."
            look = verb_line("replay", paths.name, paths.home, *replay)
            if num_skipped > 1:
                log_detail(warning)
            else:
                LOGGER.warning("%s To look at it: %s", warning, look)
        allowed = self._settings.training.max_consecutive_nan_steps
        if num_skipped > allowed:
            raise PipelineError(
                f"{num_skipped} steps in a row had a loss or gradient that is not finite, the last at epoch {epoch}, "
                f"step {report.step}; training.json allows max_consecutive_nan_steps: {allowed}.\n"
                "  fix: let autograd name the operation with\n"
                f"    {run_line(paths.name, paths.home, '--resume', '--detect-anomaly')}\n"
                "  or train with a lower learning rate or grad_clip_norm. They are frozen, so make a variant with\n"
                f"    {verb_line('new', 'VARIANT', paths.home, '--from', paths.name)}\n"
                "  or start again with\n"
                f"    {run_line(paths.name, paths.home, *reset_flags(paths))}"
            ).shared()

    def _title(self, stage: str, epoch: int) -> str:
        """Return the name of a stage with its epoch, and how many there are if that is known."""
        last = self._max_epochs
        return f"{stage} {epoch}/{last}" if last else f"{stage} {epoch}"

    def _note_epoch(self, split: str, epoch: int) -> None:
        session = self._session
        if session.processes.is_rank_zero:
            memory = memory_in_mb(session.processes.device)
            session.journal.note(EPOCH, split=split, epoch=epoch, memory=memory, **self._pace.epoch())

    @property
    def _max_epochs(self) -> int | None:
        """The last epoch, if the settings or the early stopper know it; an author's own need not."""
        limits = (self._limit, getattr(self._components.early_stopper, "max_epochs", None))
        return min((limit for limit in limits if limit is not None), default=None)

    def _weights(self) -> dict[str, float]:
        weighter = self._components.loss_weighter
        return {name: float(weighter.get_loss_weight(name)) for name in self._settings.register_names}

    def commit_prepared(self, progress: Progress) -> None:
        """Commit what an experiment has before its first stage."""
        self._commit(Moment.PREPARED, 0, progress)

    def _commit(self, moment: Moment, epoch: int, progress: Progress) -> None:
        """Let rank zero commit, and all ranks write their shards; ``progress`` is the place that follows."""
        session = self._session
        # What components save is compared only once they have judged an epoch: it takes a call of ``save`` on every
        # rank.
        is_judged = moment is Moment.AFTER_EVALUATION or (moment is Moment.AFTER_TRAINING and not self._has_evaluations)
        session.ranks.compare(f"before the commit at {progress}", saves=is_judged)
        if session.parts.writes_shards:
            folders = session.processes.on_rank_zero(self._begin_commit, moment, epoch, progress)
            session.processes.on_all_ranks(session.parts.write_shards, folders)
        elif session.processes.is_rank_zero:
            self._begin_commit(moment, epoch, progress)
        if session.processes.is_rank_zero:
            # Trackers get values once they are permanent, and never ones that a resumed run would compute again.
            batch = self._publisher.collect(self.recorded_epoch(progress))
            session.commits.complete(partial(self._publisher.send, batch))
            self.write_status(progress)
        self._committed_at = time.monotonic()

    def _begin_commit(self, moment: Moment, epoch: int, progress: Progress) -> dict[str, Path]:
        """Take a copy of the state; return the folders of shards that all ranks must fill."""
        run_state = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S%z"),
            **self._session.parts.save_run_values(),
        }
        return self._session.commits.begin(partial(self._changes, moment, epoch), progress, run_state)

    def _changes(self, moment: Moment, epoch: int) -> Changes:
        """Return what a commit of this kind changes."""
        parts = self._session.parts
        committed = self._session.store.current.files
        match moment:
            case Moment.PREPARED:
                return parts.initial_state()
            case Moment.IN_EPOCH:
                return parts.running_epoch()
            case Moment.NOT_EVALUATED:
                # Only the place changes.
                return Changes()
            case Moment.AFTER_EVALUATION:
                return parts.evaluated_epoch(epoch, self._kept_pools, committed, self._artifacts)
        trained = parts.trained_epoch(epoch, committed)
        if self._has_evaluations:
            return trained
        return trained | parts.evaluated_epoch(epoch, self._kept_pools, committed)

    @staticmethod
    def recorded_epoch(progress: Progress) -> int:
        """Return the epoch whose steps the records hold."""
        is_running = progress.stage == EVALUATION or progress.step or progress.is_finished
        return progress.epoch if is_running else progress.epoch - 1

    def write_status(self, progress: Progress, state: str = "running", **more: object) -> None:
        """Let the status file name the place of the run."""
        if self._session.processes.is_rank_zero:
            last = latest_values(self._session.records.losses, "val")
            self._session.status.write(
                state=state, progress=progress.as_json(), last=last, best=self._session.best, **more
            )

    def _new_bar(self, name: str, total: int, done: int, updates: int) -> ProgressBar:
        is_shown = self._shows_bar and self._session.processes.is_rank_zero
        return ProgressBar(name, total, done, updates, enabled=is_shown)
