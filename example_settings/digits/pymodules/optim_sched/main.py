"""AdamW with one epoch of warm-up and a cosine decay."""

from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from pipeline.components import TorchScheduler, WarmupScheduler, parameters


def create_optimizer(modules):
    heads = [*modules["digit_head"].parameters(), *modules["rotation_head"].parameters()]
    return AdamW(
        [
            {"name": "backbone", "params": modules["backbone"].parameters(), "weight_decay": parameters.weight_decay},
            {"name": "heads", "params": heads, "weight_decay": 0.0},
        ],
        lr=parameters.lr,
    )


def create_scheduler(optimizer):
    decay = TorchScheduler(CosineAnnealingLR(optimizer, T_max=parameters.num_epochs - 1, eta_min=1e-4))
    return WarmupScheduler(optimizer, warmup_epochs=1, then=decay)
