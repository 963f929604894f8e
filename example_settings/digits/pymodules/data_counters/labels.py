"""How often each digit occurs, for class weights."""

from pipeline.components import CategoryCounter

data_counter = CategoryCounter("label", num_categories=10)
dataset_names = ["digits"]
