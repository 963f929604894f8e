"""From a batch of DATASET to its losses."""

from pipeline.components import BaseModuleTransform

# Everything that is recorded of this dataset.
loss_registers = ["loss"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        outputs = modules["MODULE"](batch["input"])
        # One value per point, not their mean: with torch's losses, reduction="none".
        return {"loss": (outputs - batch["target"]).square().flatten(1).mean(dim=1)}
