"""Metrics of a split: a state per batch, combined along the positions of the batches, and computed on rank zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import BrokenContract, Problem
from pipeline.experiment.pymodules.definitions import MetricDefinition
from pipeline.experiment.pymodules.user_code import place_of, user_problem
from pipeline.system.accelerators import CPU
from pipeline.training.engines.reduction import Branch, Branches

# What a module transform returned for the update of a metric.
Arguments = Any
# By name: a tensor, or for rows that follow each other a list of them. None: the batch has nothing for the metric.
State = dict[str, Any] | None
Values = dict[str, float]
_MAX_GATHERED_BYTES = 1 << 30
_COMBINATIONS = ("sum", "min", "max", "cat")


class Adapter(Protocol):
    """How a metric of some kind gives the state of a batch, combines two and computes the value of all."""

    def state_of(self, arguments: Arguments) -> State: ...

    def add(self, left: State, right: State) -> State: ...

    def pack(self, state: State) -> State:
        """Return a state as it is sent to another rank: on the host, in few tensors."""

    def compute(self, state: State) -> object: ...


class _OwnAdapter:
    """A metric of our contract, whose update returns the state of a batch."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def _combination(self, name: str) -> str:
        combine = self._metric.combine
        how = combine if isinstance(combine, str) else combine.get(name)
        if how not in _COMBINATIONS:
            raise ValueError(f"combine must be one of {', '.join(_COMBINATIONS)}, but for {name!r} it is {how!r}")
        return str(how)

    def state_of(self, arguments: Arguments) -> State:
        state = _call(self._metric.update, arguments)
        if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise TypeError(f"update must return a dict of tensors, but returned {state!r}")
        return {name: _prepare(value, self._combination(name)) for name, value in state.items()}

    def add(self, left: State, right: State) -> State:
        return _add_states(left, right, self._combination)

    def pack(self, state: State) -> State:
        return _join_state(state)

    def compute(self, state: State) -> object:
        assert state is not None
        return self._metric.compute({name: join_rows(value) for name, value in state.items()})


class _TorchmetricsAdapter:
    """A metric of torchmetrics: reset and updated with each batch alone, its state taken, never synchronised itself."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._combinations = {name: _name_reduction(reduction) for name, reduction in metric._reductions.items()}

    @classmethod
    def knows(cls, metric: Any) -> bool:
        """Return whether all states of a metric are combined in a way that is known here."""
        reductions = getattr(metric, "_reductions", None)
        if not isinstance(reductions, Mapping) or not reductions:
            return False
        # One that wraps others keeps its states in them.
        is_alone = not any(hasattr(part, "_reductions") for part in metric.modules() if part is not metric)
        return is_alone and all(map(_name_reduction, reductions.values()))

    def state_of(self, arguments: Arguments) -> State:
        metric = self._metric
        metric.reset()
        for tensor in _tensors(arguments):
            if metric.device != tensor.device:
                metric.to(tensor.device)
            break
        _call(metric.update, arguments)
        state = {}
        for name, how in self._combinations.items():
            value = getattr(metric, name)
            if isinstance(value, list) and value:
                value = torch.cat([torch.atleast_1d(rows) for rows in value])
            state[name] = _prepare(value, how)
        metric.reset()
        return state

    def add(self, left: State, right: State) -> State:
        return _add_states(left, right, lambda name: self._combinations[name])

    def pack(self, state: State) -> State:
        return _join_state(state)

    def compute(self, state: State) -> object:
        assert state is not None
        metric = self._metric
        metric.reset()
        metric.to(CPU)
        for name, value in state.items():
            default = metric._defaults[name]
            if isinstance(default, list):
                setattr(metric, name, [join_rows(value)] if value else [])
            else:
                setattr(metric, name, join_rows(value).to(default.dtype))
        # Otherwise it warns that it was never updated.
        metric._update_count = 1
        found = metric.compute()
        metric.reset()
        return found


class _GatheringAdapter:
    """A metric that must see all batches itself: what its update takes is kept, and it is updated on rank zero."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._num_bytes = 0

    def state_of(self, arguments: Arguments) -> State:
        kept = _to_host(arguments)
        self._num_bytes += sum(tensor.nbytes for tensor in _tensors(kept))
        if self._num_bytes > _MAX_GATHERED_BYTES:
            raise ValueError(
                f"what its update takes is gathered, and must have less than {_MAX_GATHERED_BYTES >> 20} MB on a "
                "process; a metric whose states are sums has no such limit"
            )
        return {"arguments": [kept]}

    def add(self, left: State, right: State) -> State:
        return _add_states(left, right, lambda name: "cat")

    def pack(self, state: State) -> State:
        # What each update takes stays apart.
        return state

    def compute(self, state: State) -> object:
        assert state is not None
        self._num_bytes = 0
        self._metric.reset()
        if hasattr(self._metric, "to"):
            self._metric.to(CPU)
        for arguments in state["arguments"]:
            _call(self._metric.update, arguments)
        found = self._metric.compute()
        self._metric.reset()
        return found


def adapt(metric: Any) -> Adapter:
    """Return how to use a metric, whichever kind it is of."""
    if hasattr(metric, "combine"):
        return _OwnAdapter(metric)
    # Metrics of torchmetrics would communicate in compute, which rank zero alone calls. Some hold others.
    for part in metric.modules() if isinstance(metric, torch.nn.Module) else ():
        setattr(part, "distributed_available_fn", _is_never_distributed)  # noqa: B010
    return _TorchmetricsAdapter(metric) if _TorchmetricsAdapter.knows(metric) else _GatheringAdapter(metric)


def _is_never_distributed() -> bool:
    return False


def is_gathered(metric: Any) -> bool:
    """Return whether a metric must see all batches itself."""
    return isinstance(adapt(metric), _GatheringAdapter)


def values_of(definition: MetricDefinition, computed: object) -> Values:
    """Return the values of a metric by the names of their registers, or raise what is wrong with them."""
    if not isinstance(computed, Mapping):
        if len(definition.names) != 1:
            raise TypeError(f"compute must return a dict of {', '.join(definition.names)}, but returned {computed!r}")
        computed = {definition.names[0]: computed}
    if set(computed) != set(definition.names):
        listed = ", ".join(map(str, computed))
        raise ValueError(f"compute must return values for {', '.join(definition.names)}, but has {listed}")
    values = {}
    for name in definition.names:
        value = computed[name]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, (int, float)):
            raise TypeError(f"compute must return a number for {name!r}, but returned {value!r}")
        values[name] = float(value)
    return values


class MetricAccumulator:
    """The states of all metrics over the batches of a split.

    A rank combines neighbouring batches at once, so that it holds about twice as many states as the logarithm of the
    number of batches. The order of combinations follows from the positions alone: the values have the same bits at any
    number of processes.
    """

    def __init__(self, definitions: Mapping[str, MetricDefinition], folder: Path, processes: Processes) -> None:
        self._definitions = definitions
        self._folder = folder
        self._processes = processes
        self._adapters: dict[str, Adapter] = {}
        self._branches: dict[str, Branches[State]] = {}
        self.clear()

    def clear(self) -> None:
        """Begin anew, also with how much a metric may gather."""
        self._adapters = {name: adapt(definition.metric) for name, definition in self._definitions.items()}
        self._branches = {name: Branches[State](adapter.add) for name, adapter in self._adapters.items()}

    def add(self, position: int, arguments: Mapping[str, Arguments]) -> None:
        """Take what a batch has for each metric; one that it has nothing for is absent."""
        for name, branches in self._branches.items():
            with self._explained(name, "update"):
                state = self._adapters[name].state_of(arguments[name]) if name in arguments else None
                branches.push(Branch(position, 1, state))

    def gather(self) -> dict[str, list[Branch[State]]]:
        """Return the combined states of all ranks on rank zero, by metric and in order, and forget them."""
        held: dict[str, list[Branch[State]]] = {}
        for name, branches in self._branches.items():
            adapter = self._adapters[name]
            with self._explained(name, "update"):
                held[name] = [Branch(branch.start, branch.size, adapter.pack(branch.value)) for branch in branches.held]
        self.clear()
        everyone = self._processes.gather_on_rank_zero(held) if held else []
        return {name: [branch for own in everyone for branch in own[name]] for name in held if everyone}

    def compute(self, gathered: Mapping[str, Sequence[Branch[State]]]) -> Values:
        """Return all values, from the states of all batches."""
        values: Values = {}
        for name, definition in self._definitions.items():
            with self._explained(name, "compute"):
                state = combine(self._adapters[name], gathered[name])
                if state is None:
                    values |= dict.fromkeys(definition.names, math.nan)
                else:
                    values |= values_of(definition, self._adapters[name].compute(state))
        return values

    def collect(self) -> Values:
        """Return the values of all metrics on every rank; all of them must ask."""
        if not self._definitions:
            return {}
        gathered = self.gather()
        return self._processes.on_rank_zero(self.compute, gathered)

    @contextmanager
    def _explained(self, name: str, method: str) -> Iterator[None]:
        """Explain what an author's metric raises in this block."""
        try:
            yield
        except Exception as error:
            file = self._folder / "metrics" / f"{name}.py"
            problem = user_problem(error, self._folder, place_of(file, "metric"), f"{method} of the metric must work")
            raise BrokenContract(problem) from error


def combine(adapter: Adapter, held: Iterable[Branch[State]]) -> State:
    """Return the state of all batches from those of neighbours, in whichever order they come."""
    branches = Branches[State](adapter.add)
    for branch in sorted(held, key=lambda branch: branch.start):
        branches.push(branch)
    return branches.root() if branches.held else None


def check_arguments(results: object, expected: Iterable[str], file: Path) -> dict[str, Arguments]:
    """Return what a module transform gave for its metrics, or refuse one that it has left out."""
    assert isinstance(results, Mapping)
    expected = list(expected)
    if lacking := [name for name in expected if name not in results]:
        what = f"must return the arguments of its metrics, {', '.join(expected)}, but lacks {', '.join(lacking)}"
        fix = f'return {{…, "{lacking[0]}": (predictions, targets)}}, or remove it from metrics'
        raise BrokenContract(Problem(place_of(file, "__call__"), what, fix))
    return {name: results[name] for name in expected}


def _call(function: Callable[..., Any], arguments: Arguments) -> Any:
    """Call with a tuple as positional arguments, a dict as named ones, and anything else as the only one."""
    if isinstance(arguments, Mapping):
        return function(**arguments)
    return function(*arguments) if isinstance(arguments, tuple) else function(arguments)


def _prepare(value: Any, how: str) -> Any:
    """Return an entry of a batch's state as it is kept: floats that are summed as float64, rows on the host."""
    if how == "cat":
        # A copy of these rows alone: a view would keep all of the tensor that it is a part of.
        return [torch.atleast_1d(_to_host(value))] if isinstance(value, torch.Tensor) else []
    value = value.detach()
    # A copy in any case: the metric may change its own state in place.
    if how != "sum":
        return value.clone()
    return value.to(torch.float64 if value.is_floating_point() else torch.int64, copy=True)


def _add_states(left: State, right: State, combination: Callable[[str], str]) -> State:
    if left is None or right is None:
        return right if left is None else left
    return {name: _COMBINE[combination(name)](value, right[name]) for name, value in left.items()}


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda left, right: left + right,
    "min": torch.minimum,
    "max": torch.maximum,
    "cat": lambda left, right: left + right,
}


def _join_state(state: State) -> State:
    """Return a state on the host, with the rows of all batches as one tensor."""
    if state is None:
        return None
    return {
        name: [join_rows(value)] if isinstance(value, list) and value else _to_host(value)
        for name, value in state.items()
    }


def join_rows(value: Any) -> torch.Tensor:
    """Return the rows of all batches as one tensor."""
    if not isinstance(value, list):
        return value  # type: ignore[no-any-return]
    # An empty one may have lost its type on the way, and must not change that of the others.
    filled = [rows for rows in value if rows.numel()] or value
    return torch.cat(filled) if filled else torch.empty(0)


def _name_reduction(reduction: Any) -> str:
    """Return how torchmetrics reduces a state over processes; empty for what cannot be done batch by batch."""
    names = {"dim_zero_sum": "sum", "dim_zero_cat": "cat", "dim_zero_max": "max", "dim_zero_min": "min"}
    return names.get(getattr(reduction, "__name__", ""), "")


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _tensors(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _tensors(child)


def _to_host(value: Any) -> Any:
    """Return a value with all its tensors copied to the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.device == CPU else value.detach().to(CPU)
    if isinstance(value, Mapping):
        return {key: _to_host(child) for key, child in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_to_host, value))
    if isinstance(value, (list, tuple)):
        return type(value)(_to_host(child) for child in value)
    return value
