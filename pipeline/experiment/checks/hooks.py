"""Ready hooks: what they name must exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from pipeline.components import UnfreezeAt
from pipeline.errors import Problem, nearest
from pipeline.experiment.pymodules.definitions import Components
from pipeline.experiment.pymodules.user_code import place_of

_MAX_NAMES_SHOWN = 10


def unfreezing_problems(components: Components, optimizers: Mapping[str, Optimizer], folder: Path) -> Iterator[Problem]:
    """Yield what keeps an ``UnfreezeAt`` from doing what it says."""
    for name, hook in components.hooks.items():
        if isinstance(hook, UnfreezeAt):
            where = place_of(folder / "hooks" / f"{name}.py", "hook")
            for what, fix in _find_problems(hook, components, optimizers):
                yield Problem(where, f"UnfreezeAt {what}", fix)


def _find_problems(
    hook: UnfreezeAt, components: Components, optimizers: Mapping[str, Optimizer]
) -> Iterator[tuple[str, str]]:
    trained = components.trained_modules
    if hook.module not in trained:
        kind = "which is frozen or an average" if hook.module in components.modules else "which does not exist"
        listed = f"the trained modules are {', '.join(trained)}.{nearest(hook.module, list(trained))}"
        fix = 'freeze single parameters with requires_grad_(False) instead of settings = {"frozen": True}'
        yield f"names module {hook.module!r}, {kind}; {listed}", fix if hook.module in components.modules else ""
        return
    chosen = hook.select(trained[hook.module])
    for pattern in hook.patterns:
        if not UnfreezeAt(hook.epoch, hook.module, pattern).select(trained[hook.module]):
            names = [parameter for parameter, _ in trained[hook.module].named_parameters()]
            more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
            yield f"has pattern {pattern!r}, which matches none of {', '.join(names[:_MAX_NAMES_SHOWN])}{more}", ""
    if hook.optimizer is not None and hook.optimizer not in components.optim_sched:
        known = list(components.optim_sched)
        yield (
            f"names optimizer {hook.optimizer!r}, but there are {', '.join(known)}.{nearest(hook.optimizer, known)}",
            "",
        )
        return
    # Without one optimizer, its parameters would be taken for those of none.
    if len(optimizers) < len(components.optim_sched):
        return
    owned = {
        id(one) for optimizer in optimizers.values() for group in optimizer.param_groups for one in group["params"]
    }
    yield from _find_owner_problems(hook, chosen, owned)


def _find_owner_problems(
    hook: UnfreezeAt, chosen: Mapping[str, nn.Parameter], owned: set[int]
) -> Iterator[tuple[str, str]]:
    in_none = [name for name, parameter in chosen.items() if id(parameter) not in owned]
    in_some = [name for name in chosen if name not in in_none]
    if hook.optimizer is None and in_none:
        what = f"unfreezes parameters that are in no optimizer: {', '.join(in_none[:_MAX_NAMES_SHOWN])}"
        yield what, "say optimizer=… and lr=…, or give them to create_optimizer, frozen or not"
    if hook.optimizer is not None and in_some:
        what = (
            f"adds parameters to {hook.optimizer!r} that are in an optimizer: {', '.join(in_some[:_MAX_NAMES_SHOWN])}"
        )
        yield what, "leave out optimizer=… and lr=…, or leave the parameters out of create_optimizer"
