"""What pymodules see of parameters.json: values by name, and nothing they could change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.components import Parameters

VALUES = {
    "lr": 0.1,
    "steps": 3,
    "name": "adam",
    "flag": True,
    "none": None,
    "widths": [8, {"deep": 1}],
    "opt": {"a": 2},
}


def test_values_keep_their_types() -> None:
    """JSON's types are Python's; lists are tuples, and objects are read like the whole."""
    parameters = Parameters(VALUES)
    assert (parameters.lr, parameters.steps, parameters.name, parameters.flag) == (0.1, 3, "adam", True)
    assert parameters.none is None
    assert parameters.opt.a == parameters["opt"]["a"] == 2
    assert parameters.widths[0] == 8
    assert parameters.widths[1].deep == 1
    assert dict(**parameters.opt) == {"a": 2}
    assert list(parameters) == list(VALUES)


@pytest.mark.parametrize(
    "act",
    [
        lambda parameters: setattr(parameters, "lr", 1),
        lambda parameters: setattr(parameters.opt, "a", 1),
        lambda parameters: delattr(parameters, "lr"),
        lambda parameters: parameters.__setitem__("lr", 1),
        lambda parameters: parameters.widths.append(1),
        lambda parameters: parameters.update(lr=1),
    ],
)
def test_nothing_can_be_changed(act: Callable[[Any], None]) -> None:
    """What a run computes with is what the file says, whatever an author's code does."""
    parameters = Parameters(VALUES)
    with pytest.raises((AttributeError, TypeError)):
        act(parameters)
    assert parameters == Parameters(VALUES)


def test_attempt_to_change_is_explained() -> None:
    """The message names the two ways in which a parameter is changed."""
    with pytest.raises(AttributeError, match=r"parameters.opt.a must not be changed.*--set parameters.opt.a=VALUE"):
        Parameters(VALUES).opt.a = 5


@pytest.mark.parametrize("read", [lambda parameters: parameters.opt.aa, lambda parameters: parameters.opt["aa"]])
def test_missing_name_is_told_with_the_nearest(read: Callable[[Any], object]) -> None:
    """A misspelt name says where it was looked for and what there is."""
    with pytest.raises((AttributeError, KeyError)) as raised:
        read(Parameters(VALUES))
    assert str(raised.value) == (
        "settings/parameters.json must have parameters.opt.aa, but parameters.opt has a. Did you mean 'a'?"
    )


def test_missing_name_can_be_asked_for() -> None:
    """The usual ways to read an optional value work."""
    parameters = Parameters(VALUES)
    assert not hasattr(parameters, "momentum")
    assert getattr(parameters, "momentum", 0.9) == parameters.get("momentum", 0.9) == 0.9


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_are_alike(copied: Callable[[Any], Any]) -> None:
    """Loader workers may receive parameters as copies."""
    parameters = Parameters(VALUES)
    assert copied(parameters) == parameters
    assert repr(copied(parameters)) == repr(parameters)
