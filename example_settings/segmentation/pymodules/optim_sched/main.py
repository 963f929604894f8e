from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from pipeline.components import TorchScheduler, parameters


def create_optimizer(modules):
    return AdamW(modules["net"].parameters(), lr=parameters.lr)


def create_scheduler(optimizer):
    return TorchScheduler(CosineAnnealingLR(optimizer, T_max=parameters.num_epochs))
