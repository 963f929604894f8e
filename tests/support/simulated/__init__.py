"""A simulated accelerator: a device ``sim`` of torch, written in Python.

It keeps its tensors apart from the CPU's: an operation on tensors of both fails. It executes late: operations are
queued, and run when the host waits for them. A copy to the host that does not block leaves garbage until then. Kernels
and waits are counted. It computes with the CPU's own kernels, so that results have the CPU's bits.

Run at once, because their results' sizes depend on values: operators such as ``nonzero`` and ``item``, at which a host
waits for any device. Not there: a second device per process, several streams, FSDP (it resizes storages),
torch.compile with inductor, sparse tensors.

``install`` sets it up once per process; ``site/sitecustomize.py`` does so in every process whose PYTHONPATH names it.
"""

from __future__ import annotations

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Register the device with torch and with the pipeline."""
    from pipeline.system.accelerators import BACKENDS
    from tests.support.simulated import autocast, group, memory, module, operators

    backend_module = module.DeviceModule()
    _setup_privateuseone_for_python_backend(memory.NAME, backend_module=backend_module)
    kernels = torch.library.Library("aten", "IMPL")
    fallbacks = torch.library.Library("_", "IMPL")
    _LIBRARIES.extend((kernels, fallbacks))
    operators.register(kernels, fallbacks)
    autocast.register(kernels, fallbacks)
    module.replace_in_torch(backend_module)
    group.register()
    BACKENDS[memory.NAME] = group.BACKEND
