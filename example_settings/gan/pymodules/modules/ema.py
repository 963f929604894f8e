from pipeline.components import parameters

settings = {"average_of": "generator", "decay": parameters.decay}
