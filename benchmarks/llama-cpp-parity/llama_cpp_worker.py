"""llama.cpp in its own environment, started by run.py and families.py: llama_cpp_worker.py GGUF.

Reads {"prompts": [text], "new_tokens": count} and answers {"version", "prompts": [{"prompt": ids,
"tokens": ids}]}; or reads {"tokens": ids, "out": file}, writes the logits after each token into
that .npy file, and answers {"version"}. Keys and values are float32 and attention is the plain one,
so that only the order of sums differs from ours.
"""

import ctypes
import json
import sys

import llama_cpp
import numpy as np

POSITIONS = 1024


def main() -> None:
    """Answer one task."""
    task = json.load(sys.stdin)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        sys.argv[1].encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = POSITIONS
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, params) if model else None
    if not context:
        raise SystemExit(f"llama.cpp cannot load {sys.argv[1]}")
    version = f"llama-cpp-python {llama_cpp.__version__}"
    if "tokens" in task:
        np.save(task["out"], decode(model, context, task["tokens"], 0, every=True))
        json.dump({"version": version}, sys.stdout)
        return
    answers = []
    for text in task["prompts"]:
        prompt = tokenize(model, text)
        answers.append(
            {"prompt": prompt, "tokens": greedy(model, context, prompt, task["new_tokens"])}
        )
    json.dump({"version": version, "prompts": answers}, sys.stdout)


def tokenize(model: int, text: str) -> list[int]:
    """Ids of a text in which names of control tokens are the tokens; nothing is added."""
    data = text.encode()
    ids = (llama_cpp.llama_token * (len(data) + 8))()
    vocab = llama_cpp.llama_model_get_vocab(model)
    count = llama_cpp.llama_tokenize(vocab, data, len(data), ids, len(ids), False, True)
    return list(ids[:count])


def greedy(model: int, context: int, prompt: list[int], count: int) -> list[int]:
    """The best token after each; nothing ends the text."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    tokens: list[int] = []
    fed, position = prompt, 0
    while len(tokens) < count:
        tokens.append(int(decode(model, context, fed, position)[-1].argmax()))
        position += len(fed)
        fed = tokens[-1:]
    return tokens


def decode(
    model: int, context: int, tokens: list[int], position: int, every: bool = False
) -> np.ndarray:
    """Logits after the last of the tokens, or after every one: [rows, V]."""
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for row, token in enumerate(tokens):
        batch.token[row], batch.pos[row] = token, position + row
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
        batch.logits[row] = every or row == len(tokens) - 1
    if code := llama_cpp.llama_decode(context, batch):
        raise SystemExit(f"llama_decode returned {code}")
    rows = range(len(tokens)) if every else [len(tokens) - 1]
    pointers = (llama_cpp.llama_get_logits_ith(context, row) for row in rows)
    kind = ctypes.POINTER(ctypes.c_float * size)
    arrays = [np.array(ctypes.cast(pointer, kind).contents, np.float32) for pointer in pointers]
    llama_cpp.llama_batch_free(batch)
    return np.stack(arrays)


if __name__ == "__main__":
    main()
