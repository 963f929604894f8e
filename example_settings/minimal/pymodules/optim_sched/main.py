from torch.optim import Adam


def create_optimizer(modules):
    return Adam(modules["net"].parameters(), lr=0.01)
