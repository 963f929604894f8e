"""Which weights are trained, and how."""

from torch.optim import AdamW

from pipeline.components import parameters


def create_optimizer(modules):
    # Every weight of a module that is not frozen must be in exactly one optimizer.
    return AdamW([{"name": name, "params": modules[name].parameters()} for name in ["MODULE"]], lr=parameters.lr)
