"""Give a model an auxiliary flow and train that alone: what the model did before, it still does.

python examples/retrofit_your_model.py MODEL TEXT OUT [STEPS]

MODEL is a Hugging Face folder, a GGUF file or a dualflow folder; TEXT a text file; OUT a new
folder; STEPS how long to train (100). Without them it runs on a tiny random model. Ctrl-C saves the
run and says how to go on with it.
"""

import sys

from tiny_model import arguments

from dualflow import AuxConfig, ReadoutConfig
from dualflow.checkpoint.convert import retrofit
from dualflow.data.config import DataConfig
from dualflow.train import OptimizerConfig, RunConfig, TrainConfig, train

source, text, out, steps = arguments(sys.argv[1:], steps=100)
flows = AuxConfig(owns=("q_proj", "o_proj"), lora_rank=8)
model = retrofit(source, out / "retrofitted", aux=flows, readout=ReadoutConfig(kind="learned"))
config = RunConfig(
    name="auxiliary", model=model.config, initial_model=str(out / "retrofitted"),
    data=DataConfig(source=str(text), tokenizer="initial_model", sequence_length=128),
    optimizer=OptimizerConfig(lr=1e-3),
    train=TrainConfig(steps=steps, batch_size=8, trainable="aux", compile="off"))  # fmt: skip
try:
    losses = train(config, out)
except KeyboardInterrupt as saved:  # Ctrl-C or SIGTERM
    sys.exit(str(saved))
print(f"loss {losses['val_loss_initial']:.3f} before, {losses['val_loss']:.3f} after")
print(f"the trained model: {out / 'auxiliary' / 'model'}")
