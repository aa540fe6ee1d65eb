"""Load a dualflow folder in transformers and generate from it.

python examples/load_in_transformers.py FOLDER PROMPT

FOLDER is a dualflow model folder (of a run: ``runs/NAME/model``); without it this runs on a tiny
random model with a LoRA. The import of
``dualflow.integrations.transformers`` tells transformers what such a folder is. For where dualflow
is not installed, ``dualflow export FOLDER OUT --format transformers`` writes a folder that brings
its own code; load that with ``trust_remote_code=True``.
"""

import sys
import tempfile
from pathlib import Path

from tiny_model import write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import dualflow.integrations.transformers  # noqa: F401  # registers the model type
from dualflow import AuxConfig
from dualflow.checkpoint.convert import retrofit

if len(sys.argv) == 3:
    folder, prompt = sys.argv[1:]
else:
    place = Path(tempfile.mkdtemp(prefix="dualflow-example-"))
    folder, prompt = str(place / "dual"), "The cat"
    flow = AuxConfig(owns=("q_proj", "o_proj", "mlp"), lora_rank=4)
    retrofit(write_model(place / "llama"), folder, aux=flow)
    print(f"on a tiny random model in {folder}")

tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(folder)
batch = tokenizer([prompt, prompt + " sat on"], return_tensors="pt", padding=True)
batch.pop("token_type_ids", None)

# The logits are log r, so greedy search, sampling and beams all work on r.
ways = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 4},
    "primary alone": {"do_sample": False, "aux": "off"},  # the primary's p
}
for name, options in ways.items():
    ids = model.generate(**batch, max_new_tokens=20, **options)
    print(f"{name}: {tokenizer.batch_decode(ids, skip_special_tokens=True)}", flush=True)
