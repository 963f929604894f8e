"""The teacher sees the clean image and says how likely each digit is; the student must say the same of the photo."""

import torch.nn.functional as F

from pipeline.components import BaseModuleTransform, parameters

loss_registers = ["distillation_loss", "digit_accuracy"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        scores = modules["head"](modules["backbone"](modules["edges"](batch["photo"])))
        taught = modules["teacher_head"](modules["teacher"](modules["edges"](batch["clean"])))
        target = (taught / parameters.temperature).softmax(dim=1)
        # No label is used to train.
        loss = F.cross_entropy(scores / parameters.temperature, target, reduction="none")
        is_right = scores.argmax(dim=1) == batch["label"]
        return {"distillation_loss": loss, "digit_accuracy": is_right.float()}
