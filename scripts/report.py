"""Gather the results of all stages of a model in one report."""
from configurator import configure

model_tag = ""  # the model to report on; empty: the newest
configure(globals())

from nanochat.training.run_report import generate

print(generate(model_tag))
