"""Train the auxiliary flow of a retrofitted model with transformers' ``Trainer``.

python examples/train_with_trainer.py MODEL TEXT OUT [STEPS]

MODEL is a Hugging Face folder, a GGUF file or a dualflow folder; TEXT a text file; OUT a new
folder; STEPS how long to train (50). Without them it runs on a tiny random model.
"""

import sys

from tiny_model import arguments
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import dualflow.integrations.transformers  # noqa: F401  # registers the model type
from dualflow.checkpoint.convert import retrofit

LENGTH = 64

source, text, out, steps = arguments(sys.argv[1:], steps=50)
retrofit(source, out / "retrofitted")
tokenizer = AutoTokenizer.from_pretrained(out / "retrofitted")
model = AutoModelForCausalLM.from_pretrained(out / "retrofitted", dtype="float32")
model.freeze_primary()  # leave it out to train everything

ids = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
rows = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH, LENGTH)]
data = [{"input_ids": row, "labels": row} for row in rows]
held_out = len(data) // 10
settings = TrainingArguments(
    str(out / "run"), max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-3,
    logging_steps=10, report_to=[], save_strategy="no",
)  # fmt: skip
trainer = Trainer(model, settings, train_dataset=data[held_out:], eval_dataset=data[:held_out])
before = trainer.evaluate()["eval_loss"]
trainer.train()
print(f"loss {before:.3f} before, {trainer.evaluate()['eval_loss']:.3f} after")
model.save_pretrained(out / "trained")
tokenizer.save_pretrained(out / "trained")
print(f"the trained model: {out / 'trained'}")
