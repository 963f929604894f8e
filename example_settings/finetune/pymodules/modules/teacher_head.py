from torch import nn

module = nn.Linear(64, 10)
settings = {
    "frozen": True,
    "save": "trained",
    "load_weights_from_exp": {"exp_name": "digits", "ckp_pool_name": "best", "module_name": "digit_head"},
}
