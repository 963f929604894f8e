from pipeline.components import MeanIoU

metric = MeanIoU(num_classes=3)
