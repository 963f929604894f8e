"""Gradients: reduced once per step, applied or skipped by all ranks together; what every engine shares."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.gradient_flags import Flags, FrozenNames, GradientFlags
from pipeline.system.accelerators import constant
from pipeline.system.seeding import seed_generators
from pipeline.training.buffers import StepBuffers, preserved_buffers
from pipeline.training.engines.reduction import BatchSums, nothing
from pipeline.training.rank_differences import refuse_differences
from pipeline.training.step_plan import BatchAssignment

_MAX_CONSTANTS = 256
# Where a message says that flags have changed: after health, stop and commit.
_NEW_FLAGS = 3
# The types of which one kernel computes all norms in float32.
_FOREACH_NORM = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class BatchLosses:
    """The optimised losses of a batch, one value per item, the factor of each in the step's loss, and their sums."""

    losses: list[torch.Tensor]
    shares: list[float]
    sums: list[torch.Tensor]


Compute = Callable[[], BatchLosses]
Roots = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class StepRequests:
    """What this rank would like all ranks to do after the step."""

    stop: bool = False
    commit: bool = False


@dataclass(frozen=True)
class StepOutcome:
    """What all ranks know after a step, without having asked each other again."""

    skipped: bool
    overflowed: bool
    stop: bool
    commit: bool
    norms: dict[str, float]
    norm: float


class GradientEngine(ABC):
    """Turns the batches of a step into one update, the same on every rank.

    Between ranks travels one message per step: whether any of them met a loss that is not finite (a sum that is 0 or
    NaN), was asked to stop or wants a commit, whether its requires_grad flags have changed, and which weights any of
    them has used. How it and the gradients are added is what engines differ in.

    The flags may change between steps; what a batch changes is undone after it, because other ranks run other batches.
    An engine reduces the weights that were trained when it was set up. In the step after a change, the weights that are
    new are reduced in a collective of their own, and then the engine is set up again. Ranks enter that collective only
    after they have compared their flags, which all of them do once a message says that a rank has others than before.
    """

    # torch averages over the ranks, but a step's loss is already normalised by the items of all of them.
    loss_scale = 1

    def __init__(
        self, experiment: Experiment, processes: Processes, new_sums: Callable[[list[torch.Tensor]], BatchSums]
    ) -> None:
        self._experiment = experiment
        self._processes = processes
        training = experiment.settings.training
        self._clip_norm = training.grad_clip_norm
        modules = experiment.components.trained_modules
        self._flags = GradientFlags(modules)
        self._built = self._to_reduce = self._flags.now()
        self._buffers = StepBuffers(modules, processes, new_sums)
        self._parameters = {
            name: [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for name, optimizer in experiment.optimizers.items()
        }
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=training.precision == "fp16")
        self._updates_draw = any(map(_may_draw, experiment.optimizers.values()))
        self._one = torch.ones((), device=processes.device)
        self._action = nothing

    def flags_state(self) -> dict[str, FrozenNames]:
        """Return what a commit holds of the flags, as the parameters that do not have them.

        A run that continues must reduce its first step as the one before would have: rounding depends on which
        gradients are added together. The flags at build time show whether an edited copy builds modules differently.
        """
        states = {"now": self._flags.now(), "reduced": self._reduced, "built": self._built}
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
        self._weights = self._flags.trained(flags)

    def reshard(self) -> None:  # noqa: B027
        """Let every rank have its shards only; modules that are not sharded stay as they are."""

    @contextmanager
    def using_waits_for(self, action: Callable[[], None]) -> Iterator[None]:
        """Act in every step while there is nothing to do but to wait: for other ranks, or for a device."""
        self._action = action
        try:
            yield
        finally:
            self._action = nothing

    def _while_ranks_wait(self) -> None:
        """Use a wait for other ranks; a device that waits for them has its host wait for the device alone."""
        if self._processes.device.type == "cpu":
            self._use_wait()

    def _while_device_works(self) -> None:
        if self._processes.device.type != "cpu":
            self._use_wait()

    def _use_wait(self) -> None:
        # Skip prefetching once a stop was requested.
        if not self._requests.stop:
            self._action()

    def begin_step(self, num_batches: int) -> None:
        """Get ready for a step of so many batches on all ranks together."""
        self._buffers.begin_step(num_batches)
        self._requests = StepRequests()
        self._finite = list[torch.Tensor]()
        self._trained = self._flags.now()
        self._has_new_flags = self._trained != self._reduced
        self._has_compared_flags = False
        self._unfrozen = self._newly_trained() if self._has_new_flags else []

    def _newly_trained(self) -> list[nn.Parameter]:
        """Return the weights that are trained now, but are not part of the reduction yet."""
        reduced = set(self._weights)
        unfrozen = [weight for weight in self._flags.trained(self._trained) if weight not in reduced]
        optimised = {parameter for own in self._parameters.values() for parameter in own}
        lost = [weight for weight in unfrozen if weight not in optimised]
        if lost:
            raise PipelineError(
                f"Parameters that require a gradient must be in an optimizer, but {', '.join(self._flags.names(lost))} "
                "require one since this step and are in none.\n"
                "  fix: add them to create_optimizer in optim_sched/*.py, frozen or not."
            )
        return unfrozen

    def backward(self, assignment: BatchAssignment, compute: Compute, requests: StepRequests | None) -> None:
        """Add the gradients of one batch of the step; the rank's last batch brings its requests."""
        self._add(compute, requests)
        self._buffers.after_batch(assignment)

    def stand_in(self, compute: Compute, requests: StepRequests | None) -> None:
        """Run a batch that another rank counts, because all ranks must run the same modules."""
        with preserved_buffers(self._experiment.components.trained_modules.values()):
            self._add(compute, requests)

    def join_without_batch(self, requests: StepRequests) -> None:
        """Take part in the reduction of a step in which this rank has no batch."""
        self._add(lambda: BatchLosses([], [], []), requests)

    def _add(self, compute: Compute, requests: StepRequests | None) -> None:
        self._requests = requests or self._requests
        self._backward(compute, is_last=requests is not None)
        if self._flags.now() != self._trained:
            self._undo_flags()

    def _undo_flags(self) -> None:
        """Take back what a batch did to the flags; refuse gradients of weights that no rank reduces in this step."""
        reduced = {*self._weights, *self._unfrozen}
        stray = [one for one in self._flags.trained(self._flags.now()) if one not in reduced and one.grad is not None]
        if stray:
            names = ", ".join(self._flags.names(stray))
            raise PipelineError(
                f"requires_grad must not be switched on by a batch, but it was for {names}: "
                "processes that run other batches would not know.\n"
                "  fix: switch it on between steps, for example in after_train_step of a scheduler."
            )
        self._flags.set(self._trained)

    def _backward(self, compute: Compute, *, is_last: bool) -> None:
        """Add the gradients of a batch, or of none."""
        roots, gradients = self._roots(compute())
        if roots:
            torch.autograd.backward(roots, gradients)

    @abstractmethod
    def _reduce(self) -> torch.Tensor:
        """Let every rank have the gradients of all batches, and return the sum of their messages."""

    def _roots(self, batch: BatchLosses) -> Roots:
        """Return where the backward pass of a batch begins, and with which gradients.

        They are those of the step's loss, whose value is not needed and never computed.
        """
        self._finite += batch.sums
        # A rank without a batch asks for the scale too: the scaler begins when it is first asked.
        scale = self.scaler.scale(self._one) if self.scaler.is_enabled() else None
        chosen = [(loss, share) for loss, share in zip(batch.losses, batch.shares, strict=True) if loss.requires_grad]
        return [loss for loss, _ in chosen], [_gradient(loss, share, scale) for loss, share in chosen]

    def _message(self, used: list[bool]) -> torch.Tensor:
        """Return a rank's message; but for the sums that must be finite, almost all steps say the same."""
        values = (0.0, self._requests.stop, self._requests.commit, self._has_new_flags, *used)
        message = _constant(values, self._processes.device).clone()
        health = message[0]
        for total in self._finite:
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
            for optimizer in self._optimizers_with_gradients():
                self.scaler.unscale_(optimizer)
        outcome = self._judge(message)
        # Weights that no rank has used have lost the gradients that the reduction gave them; one process gives none.
        stepping = self._optimizers_with_gradients()
        if self._updates_draw:
            seed_generators(*key)
        if not outcome.skipped:
            self._clip(outcome.norm)
            for optimizer in stepping:
                # Not scaler.step, which waits for the device: all ranks know that the gradients are finite.
                optimizer.step()
        if self.scaler.is_enabled():
            # A step that used no weight keeps the scale.
            self.scaler.update(None if stepping else self.scaler.get_scale())
        self._buffers.end_step(skipped=outcome.skipped)
        self._forget()
        if self._has_new_flags:
            self._set_up(self._trained)
        return outcome

    def _optimizers_with_gradients(self) -> list[torch.optim.Optimizer]:
        named = self._experiment.optimizers.items()
        return [one for name, one in named if any(own.grad is not None for own in self._parameters[name])]

    def _reduce_unfrozen(self, message: torch.Tensor) -> None:
        """Reduce the gradients of weights that are trained since this step, once all ranks have the same flags."""
        self._check_flags(float(message[_NEW_FLAGS]))
        if self._unfrozen:
            self._sum_unfrozen()

    def _check_flags(self, changed: float) -> None:
        """Refuse flags that are not the same on all ranks; called by all of them, and done once per step."""
        if changed > 0 and not self._has_compared_flags:
            self._has_compared_flags = True
            refuse_differences(self._processes, self._flags.named(self._trained), "in a training step")

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
        self._forget_if_unused(self._unfrozen, are_used)

    def _forget_if_unused(self, weights: list[nn.Parameter], are_used: list[bool]) -> None:
        """Take gradients away that no rank has."""
        counts = self._processes.sum(torch.tensor(are_used, dtype=torch.int32)).tolist()
        for weight, count in zip(weights, counts, strict=True):
            weight.grad = weight.grad if count else None

    def _judge(self, message: torch.Tensor) -> StepOutcome:
        owners = self._gradients()
        norms = _norms([gradient for _, gradient in owners])
        self._while_device_works()
        known = self._known(message, norms)
        health, stop, commit, changed, *used = known[: len(message)]
        self._check_flags(changed)
        self._forget_unused(used)
        values: dict[str, list[float]] = {name: [] for name in self._parameters}
        for (name, _), value in zip(owners, known[len(message) :], strict=True):
            values[name].append(value)
        by_optimizer = {name: math.hypot(*own) for name, own in values.items()}
        is_finite = all(math.isfinite(value) for value in by_optimizer.values())
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
        return [(name, grad) for name, own in self._parameters.items() for one in own if (grad := one.grad) is not None]

    def _known(self, message: torch.Tensor, norms: list[torch.Tensor]) -> list[float]:
        """Return message and norms as numbers: the one moment per step at which the host waits for the device."""
        return torch.cat([message, torch.stack(norms)]).tolist() if norms else message.tolist()

    def _forget_unused(self, used: list[float]) -> None:
        """Take away what a reduction gives to parameters that no rank has used: optimizers must not see it."""
        if not all(used):
            for parameter, count in zip(self._weights, used, strict=True):
                parameter.grad = parameter.grad if count else None

    def _clip(self, norm: float) -> None:
        if self._clip_norm is not None and norm > self._clip_norm:
            for parameters in self._parameters.values():
                clip_grads_with_norm_(parameters, self._clip_norm, self._on_device(norm))

    def _on_device(self, number: float) -> torch.Tensor:
        """Return a number as a tensor; torch.tensor would copy it, and the host would wait."""
        return torch.full((), number, dtype=torch.float32, device=self._processes.device)

    def _forget(self) -> None:
        for optimizer in self._experiment.optimizers.values():
            optimizer.zero_grad(set_to_none=True)


def _may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an update may draw random numbers: those of torch itself, with no hooks around them, do not."""
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(has_hooks) or not type(optimizer).__module__.startswith("torch.optim.")


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each gradient, as float32."""
    if all(gradient.dtype in _FOREACH_NORM and not gradient.is_sparse for gradient in gradients):
        return list(torch._foreach_norm(gradients, dtype=torch.float32)) if gradients else []
    norms = []
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        norms.append(torch.linalg.vector_norm(values).to(torch.float32))
    return norms


def _gradient(loss: torch.Tensor, share: float, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of a share of the sum of some losses, with respect to each."""
    if scale is None:
        # Autograd may keep it as the gradient of a weight, so it must not be shared.
        return torch.full_like(loss, share)
    return (scale * share).to(loss.dtype).expand(loss.shape)


@lru_cache(maxsize=_MAX_CONSTANTS)
def _constant(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return numbers as a read-only tensor; most steps need the same as the one before."""
    return constant(values, device)
