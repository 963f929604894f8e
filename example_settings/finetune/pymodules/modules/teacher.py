"""What digits has learned, frozen. These results have no copy of its weights: every start takes them from digits."""

from ..utils.networks import backbone

module = backbone()
settings = {
    "frozen": True,
    "save": "trained",
    "load_weights_from_exp": {"exp_name": "digits", "ckp_pool_name": "best", "module_name": "backbone"},
}
