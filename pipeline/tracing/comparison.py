"""Two runs of the same steps, compared by what their ranks have recorded and by what was committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.paths import ExperimentPaths
from pipeline.store.compare import first_difference
from pipeline.tracing.retrace import Event, read_trace

# Kind, epoch, step, and the position of a batch or else the rank.
_Key = tuple[str, int, int, int]
_Trace = dict[_Key, Event]
# In the order in which differences arise: what is loaded, what is computed from it, what the step makes of that.
_KINDS = ("batch", "losses", "step")
# What is compared when a step has ended, also in the order in which it arises. {} stands for the names that differ.
_STEP_DIFFERENCES = {
    "rates": "learning rates after the step differ (look at the schedulers in optim_sched/)",
    "loss_weights": "loss weights after the step differ (look at loss_weighter.py)",
    "norms": "gradient norms differ, though the losses do not (look at the modules' backward passes)",
    "modules": "weights or buffers of {} differ after the step",
    "optimizers": "the state of optimizer {} differs after the step",
    "skipped": "one of the two skipped the step",
}
_MAX_SHOWN_POINTS = 6


@dataclass(frozen=True)
class Comparison:
    """The first difference between a run and the reference, and component state that was lost at a resume."""

    difference: str | None
    lost: list[str]


def life_name(number: int) -> str:
    """Return the name under which the run records its life between two kills, counted from 0."""
    return f"life_{number}"


def count_batches(scratch: ExperimentPaths) -> int:
    """Return how many batches the uninterrupted run has recorded."""
    return sum(kind == "batch" for kind, *_ in _read_life(scratch, 0))


def compare_runs(
    reference: ExperimentPaths, scratch: ExperimentPaths, lives: Sequence[int], *, names_processes: bool
) -> Comparison:
    """Compare a run with the uninterrupted reference; ``lives`` are the numbers of processes of its starts."""
    expected = _read_life(reference, 0)
    recorded: _Trace = {}
    world_sizes: dict[_Key, int] = {}
    lost: dict[str, None] = {}
    for number, nproc in enumerate(lives):
        life = _read_life(scratch, number)
        if number:
            lost |= dict.fromkeys(_find_lost_state(expected, life))
        # A later life repeats the steps that a kill has undone: what counts is how they were done last.
        recorded |= life
        world_sizes |= dict.fromkeys(life, nproc)
    key, difference = _find_first_difference(expected, recorded)
    if difference is None:
        committed = first_difference(reference.data, scratch.data)
        difference = committed and f"data/{committed}"
    if difference and names_processes:
        # What no life has, and committed files, are the work of all lives.
        responsible = lives if key is None or key not in world_sizes else [world_sizes[key]]
        difference = f"with {describe_world_sizes(responsible)}, {difference}"
    return Comparison(difference, list(lost))


def describe_world_sizes(world_sizes: Sequence[int]) -> str:
    """Return numbers of processes in words, such as '1, 2 and 3 processes'."""
    *others, last = (str(nproc) for nproc in dict.fromkeys(world_sizes))
    listed = f"{', '.join(others)} and {last}" if others else last
    return "1 process" if listed == "1" else f"{listed} processes"


def _read_life(scratch: ExperimentPaths, number: int) -> _Trace:
    events = read_trace(scratch, life_name(number))
    return {
        (event["kind"], event["epoch"], event["step"], event.get("position", event["rank"])): event for event in events
    }


def _find_lost_state(expected: _Trace, life: _Trace) -> list[str]:
    """Return what a component remembered before a kill and does not after the resume."""
    sentences = []
    for key, event in life.items():
        if key[0] != "components" or key not in expected:
            continue
        for name, before in expected[key]["states"].items():
            after = event["states"].get(name)
            if after != before:
                sentences.append(f"pymodules/{name} was {before} before the kill and is {after} after the resume")
    return sentences


def _find_first_difference(expected: _Trace, recorded: _Trace) -> tuple[_Key | None, str | None]:
    """Return what differs first, and in words how."""
    places = [
        (epoch, step, _KINDS.index(kind), position)
        for kind, epoch, step, position in {**expected, **recorded}
        if kind in _KINDS
    ]
    for epoch, step, kind_index, position in sorted(places):
        key = (_KINDS[kind_index], epoch, step, position)
        difference = _describe_difference(key, expected, recorded)
        if difference is not None:
            return key, f"epoch {epoch}, step {step}: {difference}"
    return None, None


def _describe_difference(key: _Key, expected: _Trace, recorded: _Trace) -> str | None:
    kind, epoch, step, position = key
    event = expected.get(key)
    other = recorded.get(key)
    if kind == "step":
        # A rank that the other run does not have must end its steps as rank 0 does.
        event = event or expected.get((kind, epoch, step, 0))
        other = other or recorded.get((kind, epoch, step, 0))
    if event is None:
        return "the uninterrupted run does not have it"
    if other is None:
        return "the compared run does not have it"
    if kind == "step":
        return _describe_step_difference(event, other)
    if kind == "batch":
        dataset = event["dataset"]
        if event["points"] != other["points"]:
            return f"a batch of {dataset!r} holds other points (look at get_split_idxs in datasets/{dataset}.py)"
        if event["digest"] != other["digest"]:
            points = ", ".join(map(str, event["points"][:_MAX_SHOWN_POINTS]))
            return (
                f"a loaded batch of {dataset!r} differs, points {points} … (look at datasets/{dataset}.py, "
                f"data_transforms/{dataset}.py and collate_fn in dataloaders/{dataset}.py)"
            )
    elif event["digests"] != other["digests"]:
        names = [name for name, digest in event["digests"].items() if other["digests"].get(name) != digest]
        dataset = expected["batch", epoch, step, position]["dataset"]
        return (
            f"the losses {', '.join(names)} of a batch of {dataset!r} differ, though batch and weights "
            f"do not (look at module_transforms/{dataset}.py and the modules it uses)"
        )
    return None


def _describe_step_difference(event: Mapping[str, object], other: Mapping[str, object]) -> str | None:
    for name, sentence in _STEP_DIFFERENCES.items():
        value = event[name]
        other_value = other[name]
        if value != other_value:
            differing = []
            if isinstance(value, dict) and isinstance(other_value, dict):
                differing = [key for key, fact in value.items() if other_value.get(key) != fact]
            return sentence.format(", ".join(differing))
    return None
