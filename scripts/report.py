"""Put together what every stage found about a model."""
from configurator import configure

from nanochat.training.report import generate

model_tag = ""  # the model to report on; empty: the newest
configure(globals())
print(generate(model_tag))
