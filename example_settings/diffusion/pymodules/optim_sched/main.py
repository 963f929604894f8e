from torch.optim import Adam

from pipeline.components import parameters


def create_optimizer(modules):
    return Adam(modules["net"].parameters(), lr=parameters.lr)
