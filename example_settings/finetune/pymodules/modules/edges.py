"""The image and its edges: the fixed filters of the digits example."""

from torch import nn

module = nn.Conv2d(1, 3, kernel_size=3, padding=1, bias=False)
settings = {
    "frozen": True,
    "strip_prefix": "filters.",
    "load_weights_from_exp": {"exp_name": "digits", "ckp_pool_name": "frzn", "module_name": "edges"},
}
