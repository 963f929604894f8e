"""The arguments of a loader: which ones an author may give, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from pipeline.errors import nearest
from pipeline.experiment.pymodules.definitions import LoaderArguments

_UNSAFE = {
    "shuffle": "the epoch's plan shuffles",
    "sampler": "the epoch's plan chooses the points",
    "batch_sampler": "the epoch's plan makes the batches",
    "drop_last": "no item is ever dropped",
    "generator": "randomness is keyed",
    "worker_init_fn": "randomness is keyed",
    "collate_fn": "define collate_fn in the same file",
    "dataset": "the dataset of the same name is used",
}
_MINIMA = {"batch_size": 1, "num_workers": 0, "point_size": 1, "prefetch_factor": 1}
_TYPES: dict[str, tuple[type, ...]] = {
    "pin_memory": (bool,),
    "persistent_workers": (bool,),
    "timeout": (int, float),
}
# Reports a name of a file and what is wrong with it.
Report = Callable[[str, str], None]


def read_loader_arguments(given: Any, name: str, report: Report) -> LoaderArguments:
    """Return the arguments that a file gives under a name; report what is wrong with them."""
    if not isinstance(given, Mapping):
        report(name, f"must be a dict, but is {given!r}")
        return LoaderArguments()
    known = [argument.name for argument in fields(LoaderArguments)]
    for key in sorted(set(given) - set(known), key=str):
        if reason := _UNSAFE.get(key):
            what = f"is not allowed: {reason}"
        else:
            what = f"is unknown; allowed are {', '.join(known)}.{nearest(str(key), known)}"
        report(f"{name}[{key!r}]", what)
    for key, minimum in _MINIMA.items():
        value = given.get(key, minimum)
        if value is None and key == "prefetch_factor":
            continue
        # In Python, True is an integer.
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            report(f"{name}[{key!r}]", f"must be an integer of {minimum} or more, but is {value!r}")
    for key, kinds in _TYPES.items():
        if key in given and not isinstance(given[key], kinds):
            report(f"{name}[{key!r}]", f"has a wrong type: {given[key]!r}")
    if isinstance(given.get("timeout"), (int, float)) and given["timeout"] < 0:
        report(f"{name}['timeout']", f"must be 0 or more, but is {given['timeout']!r}")
    if given.get("multiprocessing_context") not in (None, "fork"):
        report(f"{name}['multiprocessing_context']", "must be 'fork': workers share imported pymodules")
    return LoaderArguments(**{key: given[key] for key in known if key in given})
