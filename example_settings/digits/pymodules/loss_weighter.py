from pipeline.components import DynamicWeightAverage

loss_weighter = DynamicWeightAverage(temperature=2.0)
