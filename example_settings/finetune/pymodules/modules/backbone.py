"""The student: what digits has learned stays as it is, and adapters are trained on top of it."""

from ..utils.low_rank import LowRankConv2d, LowRankLinear, train_adapters_only
from ..utils.networks import backbone

module = train_adapters_only(backbone(LowRankConv2d, LowRankLinear))
settings = {
    # The adapters are new.
    "strict": False,
    "load_weights_from_exp": {"exp_name": "digits", "ckp_pool_name": "best", "module_name": "backbone"},
}
