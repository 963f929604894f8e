"""AdamW; matrices decay, biases and norms do not. Rates follow steps: a linear warm-up, then a cosine."""

from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from pipeline.components import TorchScheduler, WarmupScheduler, parameters


def create_optimizer(modules):
    weights = list(modules["transformer"].parameters())
    return AdamW(
        [
            {"name": "decayed", "params": [weight for weight in weights if weight.ndim > 1], "weight_decay": 0.1},
            {"name": "others", "params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
        ],
        lr=parameters.lr,
        betas=(0.9, 0.95),
    )


def create_scheduler(optimizer):
    num_steps = parameters.num_steps - parameters.warmup_steps
    decay = TorchScheduler(CosineAnnealingLR(optimizer, T_max=num_steps, eta_min=parameters.lr / 10), per="step")
    return WarmupScheduler(optimizer, warmup_steps=parameters.warmup_steps, then=decay)
