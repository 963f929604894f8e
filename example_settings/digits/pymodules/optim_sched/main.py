"""AdamW with one epoch of warm-up and a cosine decay."""

from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from pipeline.components import TorchScheduler, WarmupScheduler

NUM_EPOCHS = 15


def create_optimizer(modules):
    heads = [*modules["digit_head"].parameters(), *modules["rotation_head"].parameters()]
    return AdamW(
        [
            {"name": "backbone", "params": modules["backbone"].parameters(), "weight_decay": 0.02},
            {"name": "heads", "params": heads, "weight_decay": 0.0},
        ],
        lr=3e-3,
    )


def create_scheduler(optimizer):
    decay = TorchScheduler(CosineAnnealingLR(optimizer, T_max=NUM_EPOCHS - 1, eta_min=1e-4), per="epoch")
    return WarmupScheduler(optimizer, warmup_epochs=1, then=decay)
