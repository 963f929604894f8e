from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from pipeline.components import TorchScheduler, parameters


def create_optimizer(modules):
    adapters = [parameter for parameter in modules["backbone"].parameters() if parameter.requires_grad]
    return AdamW(
        [{"name": "adapters", "params": adapters}, {"name": "head", "params": modules["head"].parameters()}],
        lr=parameters.lr,
    )


def create_scheduler(optimizer):
    return TorchScheduler(CosineAnnealingLR(optimizer, T_max=parameters.num_epochs))
