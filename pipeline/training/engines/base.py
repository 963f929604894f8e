"""What every engine shares: gradients are reduced once per step, then applied or skipped by all ranks together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.gradient_flags import Flags, FrozenNames, GradientFlags
from pipeline.experiment.turns import Turn
from pipeline.system.accelerators import constant
from pipeline.system.seeding import seed_generators
from pipeline.training.buffers import StepBuffers
from pipeline.training.engines.reduction import BatchSums, gradient_norms
from pipeline.training.rank_differences import refuse_differences
from pipeline.training.step import BatchLosses, StepOutcome, StepRequests
from pipeline.training.step_plan import BatchAssignment

_MAX_CONSTANTS = 256
# The entry of a step's message that says whether flags have changed: it follows health, stop and commit.
_NEW_FLAGS = 3


class GradientEngine(ABC):
    """Turns the batches of a step into one update, the same on every rank::

        begin_step
        for each batch of this rank: add_batch      (the last one brings the rank's requests)
        or, without any batch: join_without_batch
        finish_step

    Between ranks travels one message per step, or per turn of it: whether any of them met a loss that is not finite (a
    sum that is 0 or NaN), was asked to stop or wants a commit, whether its requires_grad flags have changed, and which
    weights any of them has used. Engines differ in how the message and the gradients are added.

    The flags may change between steps; what a batch changes is undone after it, because other ranks run other batches.
    An engine reduces the weights that were trained when it was set up. In the step after a change, the weights that are
    new are reduced in a collective of their own, and then the engine is set up again. Ranks enter that collective only
    after they have compared their flags, which all of them do once a message says that a rank has others than before.
    """

    # A factor of every loss: the world size where torch averages gradients over ranks, and 1 where they are added. A
    # step's loss is already normalised by the items of all ranks.
    loss_scale = 1

    def __init__(self, experiment: Experiment, processes: Processes, sums: type[BatchSums]) -> None:
        self._experiment = experiment
        self._processes = processes
        training = experiment.settings.training
        self._clip_norms = {
            name: training.grad_clip_norm if entry.grad_clip_norm is None else entry.grad_clip_norm
            for name, entry in experiment.components.optim_sched.items()
        }
        # The others share the limit of the settings.
        self._clipped_alone = [
            name for name, entry in experiment.components.optim_sched.items() if entry.grad_clip_norm is not None
        ]
        modules = experiment.components.trained_modules
        self._flags = GradientFlags(modules)
        self._built = self._to_reduce = self._flags.now()
        self._num_groups = -1
        self._buffers = StepBuffers(modules, processes, sums)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=training.precision == "fp16")
        self._updates_draw = any(map(_may_draw, experiment.optimizers.values()))
        # Optimizers that must know of a turn without a step.
        self._skippable = [name for name, optimizer in experiment.optimizers.items() if hasattr(optimizer, "skip_step")]
        self._one = torch.ones((), device=processes.device)
        self._load_next: Callable[[], None] | None = None

    def flags_state(self) -> dict[str, FrozenNames]:
        """Return the flags for a commit, as lists of the parameters that do not have them."""
        states = {
            "now": self._flags.now(),
            # A run that continues must reduce its first step as the one before would have: rounding depends on which
            # gradients are added together.
            "reduced": self._reduced,
            # The flags at build time show whether an edited copy builds modules differently.
            "built": self._built,
        }
        return {name: self._flags.as_json(flags) for name, flags in states.items()}

    def load_flags(self, state: Mapping[str, FrozenNames]) -> None:
        """Set the flags as they were committed, but for those that an edited copy has changed since."""
        was_built = self._flags.from_json(state["built"])
        committed = zip(self._built, was_built, self._flags.from_json(state["now"]), strict=True)
        self._flags.set(tuple(now if now != before else flag for now, before, flag in committed))
        self._to_reduce = self._flags.from_json(state["reduced"])

    def prepare(self) -> None:
        """Set up the reduction once initial or committed weights are there."""
        self._set_up(self._to_reduce)

    def _set_up(self, flags: Flags) -> None:
        """Reduce the weights with these flags from now on."""
        self._reduced = flags
        self._weights = self._flags.select_trained(flags)

    def reshard(self) -> None:  # noqa: B027
        """Let every rank have its shards only; modules that are not sharded stay as they are."""

    def _list_parameters(self) -> None:
        """List the parameters of each optimizer, again if hooks have added groups since."""
        optimizers = self._experiment.optimizers
        num_groups = sum(len(optimizer.param_groups) for optimizer in optimizers.values())
        if num_groups != self._num_groups:
            self._num_groups = num_groups
            self._parameters = {
                name: [parameter for group in optimizer.param_groups for parameter in group["params"]]
                for name, optimizer in optimizers.items()
            }

    @contextmanager
    def prefetching(self, load_next: Callable[[], None]) -> Iterator[None]:
        """Call ``load_next`` once in every step, while this process could only wait."""
        self._load_next = load_next
        try:
            yield
        finally:
            self._load_next = None

    def _prefetch(self, *, while_device_works: bool) -> None:
        """Load the next batch at the moment at which this kind of device lets the host wait.

        A CPU waits for other ranks. With an accelerator, collectives are queued, and the host waits for the device.
        """
        is_right_moment = while_device_works == (self._processes.device.type != "cpu")
        # Skip prefetching once a stop was requested.
        if self._load_next is not None and is_right_moment and not self._requests.stop:
            self._load_next()

    def begin_step(self, num_batches: int, turn: Turn | None = None) -> None:
        """Get ready for a step of so many batches on all ranks together, or for one turn of it."""
        self._turn = turn
        self._buffers.begin_step(num_batches)
        self._requests = StepRequests()
        self._loss_sums = list[torch.Tensor]()
        self._list_parameters()
        self._trained = self._flags.now()
        self._has_new_flags = self._trained != self._reduced
        self._has_compared_flags = False
        self._unfrozen: list[nn.Parameter] = []
        if self._has_new_flags:
            reduced = set(self._weights)
            optimised = {parameter for parameters in self._parameters.values() for parameter in parameters}
            self._unfrozen = [weight for weight in self._flags.select_trained(self._trained) if weight not in reduced]
            lost = [weight for weight in self._unfrozen if weight not in optimised]
            if lost:
                raise PipelineError(
                    "Parameters that require a gradient must be in an optimizer, but "
                    f"{', '.join(self._flags.names(lost))} require one since this step and are in none.\n"
                    "  fix: add them to create_optimizer in optim_sched/*.py, frozen or not, or with "
                    "add_param_group in a hook."
                )

    def add_batch(self, assignment: BatchAssignment, losses: BatchLosses, requests: StepRequests | None) -> None:
        """Add the gradients of one batch of the step; the rank's last batch brings its requests."""
        self._run_backward(losses, requests)
        if not assignment.is_stand_in:
            self._buffers.after_batch(assignment)

    def join_without_batch(self, requests: StepRequests) -> None:
        """Take part in the reduction of a step in which this rank has no batch."""
        self._run_backward(BatchLosses.of_nothing(), requests)

    def _run_backward(self, batch: BatchLosses, requests: StepRequests | None) -> None:
        self._requests = requests or self._requests
        self._loss_sums += batch.sums.values()
        # A rank without a batch asks for the scale too: the scaler begins when it is first asked.
        scale = self.scaler.scale(self._one) if self.scaler.is_enabled() else None
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        if self._turn is None or self._turn.is_whole:
            roots, gradients = self._roots(batch, batch.losses, scale)
        else:
            self._follow(batch, self._turn, scale)
        self._backward(roots, gradients, is_last=requests is not None)
        if self._flags.now() != self._trained:
            self._undo_flags()

    @staticmethod
    def _roots(
        batch: BatchLosses, registers: Iterable[str], scale: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return where a backward pass begins, and the gradients there.

        It begins at the losses, with the gradients of the step's loss, whose value is never computed.
        """
        roots = []
        gradients = []
        for name in registers:
            loss = batch.losses[name]
            if loss.requires_grad:
                roots.append(loss)
                factor = batch.scales[name]
                if scale is None:
                    # Autograd may keep it as the gradient of a weight, so it must not be shared.
                    gradients.append(torch.full_like(loss, factor))
                else:
                    gradients.append((scale * factor).to(loss.dtype).expand(loss.shape))
        return roots, gradients

    def _follow(self, batch: BatchLosses, turn: Turn, scale: torch.Tensor | None) -> None:
        """Add the gradients of one batch to the weights of the optimizers whose turn it is.

        One backward pass for all optimizers that follow the same registers, restricted to their weights: the gradient
        of any other loss never reaches them. Flags stay as they are.
        """
        passes = []
        for follower in turn.followers:
            roots, gradients = self._roots(batch, [name for name in batch.losses if name in follower.registers], scale)
            own = [weight for name in follower.optimizers for weight in self._parameters[name] if weight.requires_grad]
            if roots and own:
                passes.append((roots, gradients, own))
        for number, (roots, gradients, own) in enumerate(passes, 1):
            torch.autograd.backward(roots, gradients, retain_graph=number < len(passes), inputs=own)

    def _backward(self, roots: list[torch.Tensor], gradients: list[torch.Tensor], *, is_last: bool) -> None:
        """Add the gradients of a batch, or of none."""
        if roots:
            torch.autograd.backward(roots, gradients)

    def _undo_flags(self) -> None:
        """Take back what a batch did to the flags; refuse gradients of weights that no rank reduces in this step."""
        reduced = {*self._weights, *self._unfrozen}
        now_trained = self._flags.select_trained(self._flags.now())
        stray = [weight for weight in now_trained if weight not in reduced and weight.grad is not None]
        if stray:
            raise PipelineError(
                "requires_grad must not be switched on by a batch, but it was for "
                f"{', '.join(self._flags.names(stray))}: "
                "processes that run other batches would not know.\n"
                "  fix: switch it on between steps, for example in after_train_step of a scheduler."
            )
        self._flags.set(self._trained)

    @abstractmethod
    def _reduce(self) -> torch.Tensor:
        """Let every rank have the gradients of all batches, and return the sum of their messages.

        An engine adds ``_message(used)`` over the ranks with its gradients, where ``used`` says which of its weights
        this rank has used, and calls ``_prefetch(while_device_works=False)`` where a CPU would wait for the others.
        """

    def _message(self, used: list[bool]) -> torch.Tensor:
        """Return this rank's message: health, stop, commit, new flags, then one entry per weight in use."""
        # Almost all steps say the same but for their health, so that the rest is copied from a constant.
        values = (0.0, self._requests.stop, self._requests.commit, self._has_new_flags, *used)
        message = _constant(values, self._processes.device).clone()
        health = message[0]
        for total in self._loss_sums:
            # Adding a sum zero times changes nothing unless it is not finite.
            health.add_(total, alpha=0)
        return message

    def _are_used(self) -> list[bool]:
        """Return for each weight whether a batch of this rank has given it a gradient."""
        return [weight.grad is not None for weight in self._weights]

    def finish_step(self, key: tuple[Hashable, ...]) -> StepOutcome:
        """Apply the reduced gradients, or skip the step if anything was not finite; the same on every rank.

        What an optimizer draws follows from ``key``: the ranks have run, and loaded, different batches by then.
        """
        message = self._reduce()
        if self._has_new_flags:
            self._reduce_unfrozen(message)
        if self.scaler.is_enabled():
            for optimizer in self._optimizers_with_gradients().values():
                self.scaler.unscale_(optimizer)
        outcome = self._read_outcome(message)
        # Asked again: weights that no rank has used have lost the gradients that the reduction gave them.
        stepping = self._optimizers_with_gradients()
        if self._updates_draw:
            seed_generators(*key)
        if not outcome.skipped:
            self._clip_gradients(outcome.norms)
            for optimizer in stepping.values():
                # Not scaler.step, which waits for the device: all ranks know that the gradients are finite.
                optimizer.step()
            updated = (name for name, optimizer in stepping.items() if not _is_between_turns(optimizer))
            outcome = replace(outcome, stepped=frozenset(updated))
        for name in self._skippable:
            if self._acts(name) and (outcome.skipped or name not in stepping):
                self._experiment.optimizers[name].skip_step()  # type: ignore[attr-defined]
        if self.scaler.is_enabled():
            # A step that used no weight keeps the scale.
            self.scaler.update(None if stepping else self.scaler.get_scale())
        self._buffers.end_step(skipped=outcome.skipped)
        self._clear_gradients()
        if self._has_new_flags:
            self._set_up(self._trained)
        return outcome

    def _acts(self, optimizer: str) -> bool:
        """Return whether it is an optimizer's turn."""
        return self._turn is None or optimizer in self._turn.optimizers

    def _optimizers_with_gradients(self) -> dict[str, torch.optim.Optimizer]:
        return {
            name: optimizer
            for name, optimizer in self._experiment.optimizers.items()
            if any(parameter.grad is not None for parameter in self._parameters[name])
        }

    def _reduce_unfrozen(self, message: torch.Tensor) -> None:
        """Reduce the gradients of weights that are trained since this step, once all ranks have the same flags."""
        self._check_flags(float(message[_NEW_FLAGS]))
        if self._unfrozen:
            self._sum_unfrozen()

    def _check_flags(self, num_changed: float) -> None:
        """Refuse flags that are not the same on all ranks; called by all of them, and done once per step."""
        if num_changed > 0 and not self._has_compared_flags:
            self._has_compared_flags = True
            flags = self._flags.describe(self._trained)
            refuse_differences(self._processes, flags, "in a training step", self._experiment.components.hooks)

    def _sum_unfrozen(self) -> None:
        """Let every rank have the newly trained weights' gradients of all batches, scaled like the others."""
        if self._processes.world_size == 1:
            return
        are_used = [weight.grad is not None for weight in self._unfrozen]
        for weight in self._unfrozen:
            # Ranks add what lies in memory, which must be in the same order on all of them.
            total = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            if weight.grad is not None:
                total.copy_(weight.grad).mul_(1 / self.loss_scale)
            weight.grad = torch.empty_like(weight).copy_(self._processes.sum(total))
        self._drop_unused(self._unfrozen, are_used)

    def _drop_unused(self, weights: list[nn.Parameter], are_used: list[bool]) -> None:
        """Take away the gradients of weights that no rank has used: an optimizer must not see them."""
        counts = self._processes.sum(torch.tensor(are_used, dtype=torch.int32)).tolist()
        for weight, count in zip(weights, counts, strict=True):
            weight.grad = weight.grad if count else None

    def _read_outcome(self, message: torch.Tensor) -> StepOutcome:
        """Read message and norms: the one moment per step at which the host waits for the device."""
        gradients = self._gradients()
        norms = gradient_norms([gradient for _, gradient in gradients])
        # The device works on what was queued, so the host is free to load.
        self._prefetch(while_device_works=True)
        numbers = self._read_numbers(message, norms)
        health, stop, commit, num_changed, *used = numbers[: len(message)]
        self._check_flags(num_changed)
        if not all(used):
            # A reduction gives zeros to weights that no rank has used. Optimizers must not see them: they would decay.
            for weight, count in zip(self._weights, used, strict=True):
                weight.grad = weight.grad if count else None
        norms_of: dict[str, list[float]] = {name: [] for name in self._parameters}
        for (optimizer_name, _), norm in zip(gradients, numbers[len(message) :], strict=True):
            norms_of[optimizer_name].append(norm)
        by_optimizer = {name: math.hypot(*values) for name, values in norms_of.items()}
        is_finite = all(math.isfinite(norm) for norm in by_optimizer.values())
        return StepOutcome(
            skipped=not (is_finite and health == 0),
            overflowed=health == 0 and not is_finite and self.scaler.is_enabled() and self.scaler.get_scale() > 1,
            stop=stop > 0,
            commit=commit > 0,
            norms=by_optimizer,
            norm=math.hypot(*by_optimizer.values()),
        )

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Return the gradients that this rank has, with the name of the optimizer of each."""
        return [
            (name, gradient)
            for name, parameters in self._parameters.items()
            for parameter in parameters
            if (gradient := parameter.grad) is not None
        ]

    def _read_numbers(self, message: torch.Tensor, norms: list[torch.Tensor]) -> list[float]:
        """Return message and norms as numbers, in one copy from the device."""
        return torch.cat([message, torch.stack(norms)]).tolist() if norms else message.tolist()

    def _clip_gradients(self, norms: Mapping[str, float]) -> None:
        """Scale gradients down to the limit that optimizers have together, or one alone."""
        if not any(self._clip_norms.values()):
            return
        together = [name for name in norms if name not in self._clipped_alone]
        for names in (together, *([name] for name in self._clipped_alone)):
            max_norm = self._clip_norms[names[0]] if names else None
            norm = math.hypot(*(norms[name] for name in names))
            if max_norm is not None and norm > max_norm:
                self._clip(names, max_norm, norm)

    def _clip(self, optimizers: list[str], max_norm: float, norm: float) -> None:
        for name in optimizers:
            clip_grads_with_norm_(self._parameters[name], max_norm, self._on_device(norm))

    def _on_device(self, number: float) -> torch.Tensor:
        """Return a number as a tensor; torch.tensor would copy it, and the host would wait."""
        return torch.full((), number, dtype=torch.float32, device=self._processes.device)

    def _clear_gradients(self) -> None:
        for optimizer in self._experiment.optimizers.values():
            # Not by setting them to None here: an author's optimizer may override it.
            optimizer.zero_grad(set_to_none=True)


def _is_between_turns(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer of several turns has only begun its step."""
    return bool(getattr(optimizer, "is_between_turns", False))


def _may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an update may draw random numbers: those of torch itself, with no hooks around them, do not."""
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(has_hooks) or not type(optimizer).__module__.startswith("torch.optim.")


@lru_cache(maxsize=_MAX_CONSTANTS)
def _constant(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return numbers as a read-only tensor; most steps need the same as the one before."""
    return constant(values, device)
