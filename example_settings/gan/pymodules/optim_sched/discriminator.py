from torch.optim import Adam

from pipeline.components import parameters

loss_registers = ["d_loss"]


def create_optimizer(modules):
    return Adam(modules["discriminator"].parameters(), lr=parameters.lr, betas=(0.5, 0.9))
