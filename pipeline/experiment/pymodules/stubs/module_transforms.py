"""From a batch of DATASET to its losses."""

from pipeline.components import BaseModuleTransform

# Everything that is recorded of this dataset. What must not be minimised, such as an accuracy, is listed in
# settings/loss_registers.json with "optimize": false.
loss_registers = ["loss"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        # Of shape (batch, 1), without the last dimension: of the same shape as the targets.
        outputs = modules["MODULE"](batch["input"])[:, 0]
        # One value per point, not their mean: with torch's losses, reduction="none".
        return {"loss": (outputs - batch["target"]) ** 2}
