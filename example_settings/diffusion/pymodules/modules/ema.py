from pipeline.components import parameters

settings = {"average_of": "net", "decay": parameters.decay}
