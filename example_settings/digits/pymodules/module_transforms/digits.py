"""Which digit is it? Rare digits count more; the accuracy is recorded beside the loss."""

import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

loss_registers = ["digit_loss", "digit_accuracy"]


class ModuleTransform(BaseModuleTransform):
    def __init__(self, data_counters, device, logger):
        super().__init__(data_counters, device, logger)
        self.class_weights = data_counters["labels"].class_weights().to(device)

    def __call__(self, batch, modules):
        scores = self.scores(batch, modules)
        loss = F.cross_entropy(scores, batch["label"], weight=self.class_weights, reduction="none")
        is_right = scores.argmax(dim=1) == batch["label"]
        return {"digit_loss": loss, "digit_accuracy": is_right.float()}

    def predict(self, batch, modules):
        return {"probabilities": self.scores(batch, modules).softmax(dim=1), "label": batch["label"]}

    def scores(self, batch, modules):
        return modules["digit_head"](modules["backbone"](modules["edges"](batch["image"])))
