from torch.optim import AdamW

from pipeline.components import parameters


def create_optimizer(modules):
    groups = [{"name": name, "params": modules[name].parameters()} for name in ("encoder", "projector", "temperature")]
    probe = {"name": "probe", "params": modules["probe"].parameters(), "lr": parameters.probe_lr}
    return AdamW([*groups, probe], lr=parameters.lr)
