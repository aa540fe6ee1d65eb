"""What the examples run on when they get no paths: a random model of a few thousand parameters in
Hugging Face's format, and a text. Both are made here, without a network.
"""

import tempfile
from pathlib import Path

import transformers

from dualflow.data.tokenizers import bytes_tokenizer

TOKENIZER_CONFIG = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'


def arguments(given: list[str], steps: int) -> tuple[Path, Path, Path, int]:
    """MODEL, TEXT, OUT and STEPS as given on the command line, or a tiny model's in a new folder.
    STEPS may be left out: ``steps`` then.
    """
    if len(given) in (3, 4):
        model, text, out = map(Path, given[:3])
        if len(given) == 4:
            if not given[3].isdecimal() or int(given[3]) < 1:
                raise SystemExit(f"STEPS is {given[3]!r}; expected a whole number from 1 on")
            steps = int(given[3])
        return model, text, out, steps
    if given:
        raise SystemExit("give MODEL TEXT OUT [STEPS], or nothing to run on a tiny random model")
    folder = Path(tempfile.mkdtemp(prefix="dualflow-example-"))
    print(f"on a tiny random model in {folder}")
    return write_model(folder / "llama"), write_text(folder / "text.txt"), folder / "out", steps


def write_model(folder: Path) -> Path:
    """A random Llama with a tokenizer of bytes; returns ``folder``."""
    config = transformers.LlamaConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, max_position_embeddings=256,
        tie_word_embeddings=True, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(bytes_tokenizer().to_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(TOKENIZER_CONFIG, encoding="utf-8")
    return folder


def write_text(path: Path) -> Path:
    """A text of some 20,000 characters; returns ``path``."""
    animals, places = ("cat", "dog", "hen", "fox"), ("mat", "hill", "roof", "bank")
    lines = [f"The {a} sat on the {p} and saw how the {b} ran over the {q}."
             for a in animals for b in animals for p in places for q in places]  # fmt: skip
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
