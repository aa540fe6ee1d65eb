"""The tokenizer, its control tokens and the chat template in a GGUF file's metadata. No torch here.

Byte-level BPE (llama.cpp's model "gpt2") whose pre-tokenizer we know; anything else is refused by
name, because a text cut differently gives other ids and a worse model without any error.
"""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from dualflow.checkpoint.companions import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
)

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_KINDS = {2: "unknown", 6: "byte"}

_TOKEN_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
"""Hugging Face's word for each named token, and llama.cpp's key (its spelling)."""

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_END_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
    "<end_of_turn>", "</s>", "<EOT>", "<|endofturn|>",
)  # fmt: skip
"""Control tokens that end a text or a turn wherever they occur, whatever the file names."""

_FILL_IN_KEYS = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
                 "prefix", "suffix", "middle")  # fmt: skip

TOKENIZER_KEYS = frozenset(
    [f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges")]
    + [f"tokenizer.ggml.{name}" for name in (*_TOKEN_KEYS.values(), *_END_KEYS)]
    + [f"tokenizer.ggml.{name}_token_id" for name in _FILL_IN_KEYS]
    + [f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "space_prefix")]
    + ["tokenizer.chat_template"]
)
"""Every key of the tokenizer's that is read; those of fill-in tokens change nothing here."""


def import_tokenizer(metadata: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """The companion files of a model folder (by name, as text), and how many ids are real.

    The files are tokenizer.json; tokenizer_config.json, with the names of the special tokens;
    generation_config.json, with every id that ends a text; and chat_template.jinja where the file
    has a template. Ids from the second result on only pad the vocabulary.

    Raises ``ValueError``: another kind of tokenizer or pre-tokenizer, missing or inconsistent keys.
    """
    model = _required(metadata, "model", str)
    if model != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model is {model!r}, which is not supported; supported: 'gpt2' "
            "(byte-level BPE)"
        )
    pre = _required(metadata, "pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {pre!r}, a pre-tokenizer that is not supported; supported: "
            f"{', '.join(map(repr, _PRE_TOKENIZERS))}"
        )
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if metadata.get(f"tokenizer.ggml.{name}", False) is not False:
            raise ValueError(f"tokenizer.ggml.{name} is set, which is not supported")
    tokens, kinds = _vocabulary(metadata)
    count = len(tokens)
    while count and kinds[count - 1] == _UNUSED:  # rows that only pad the matrices
        count -= 1
    tokens, kinds = tokens[:count], kinds[:count]
    backend = tokenizers.Tokenizer(_bpe(tokens, _required(metadata, "merges", list)))
    # The library's stubs leave these attributes untyped.
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, of_kind in zip(tokens, kinds, strict=True)
            if of_kind == kind
        ]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    _check_ids(backend, tokens)
    files = {TOKENIZER: backend.to_str(pretty=False), **_names(metadata, tokens, kinds)}
    return files, count


def _required(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, kind):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"tokenizer.ggml.{name} is {found}; expected a {kind.__name__}")
    return value


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens, kinds = _required(metadata, "tokens", list), _required(metadata, "token_type", list)
    if len(tokens) != len(kinds) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(
            f"tokenizer.ggml.tokens has {len(tokens):,} entries, token_type {len(kinds):,}; "
            "expected as many texts as types"
        )
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise ValueError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind not in (_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED):
            raise ValueError(
                f"token {number} ({token!r}) is of type {_KINDS.get(kind, kind)!r}, which a "
                "byte-level BPE does not have"
            )
    return tokens, kinds


def _bpe(tokens: list[str], merges: list[Any]) -> models.BPE:
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for number, merge in enumerate(merges):
        left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(
                f"tokenizer.ggml.merges[{number}] is {merge!r}; expected two tokens of the "
                "vocabulary whose union is one too"
            )
        pairs.append((left, right))
    return models.BPE(vocab=vocab, merges=pairs)


def _check_ids(backend: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """An added token that is no entry of the vocabulary would get an id of its own."""
    wrong = [token for number, token in enumerate(tokens) if backend.token_to_id(token) != number]
    if wrong or backend.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise ValueError(f"the tokenizer gives other ids than the file, as for {wrong[:3]!r}")


def _names(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, str]:
    names: dict[str, Any] = {}
    for name, key in _TOKEN_KEYS.items():
        number = _id(metadata, key, len(tokens))
        if number is not None:
            names[f"{name}_token"] = tokens[number]
    if "eos_token" not in names:
        raise ValueError("tokenizer.ggml.eos_token_id is missing: nothing says where a text ends")
    ends = [_id(metadata, key, len(tokens)) for key in _END_KEYS]
    known = {name: number for number, name in enumerate(tokens) if kinds[number] == _CONTROL}
    ends += [known.get(name) for name in _END_NAMES]
    end_ids = list(dict.fromkeys(number for number in ends if number is not None))
    files = {
        TOKENIZER_CONFIG: _json(names),
        GENERATION_CONFIG: _json({"eos_token_id": end_ids}),
    }
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ValueError("tokenizer.chat_template is not a text")
        files[CHAT_TEMPLATE] = template
    return files


def _id(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    number = metadata.get(f"tokenizer.ggml.{key}")
    if number is not None and (type(number) is not int or not 0 <= number < count):
        raise ValueError(
            f"tokenizer.ggml.{key} is {number!r}; expected an id from 0 to {count - 1:,}"
        )
    return number


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit on its own, then GPT-2's cut."""
    parts = [pre_tokenizers.Digits(individual_digits=True), _gpt2()]
    return pre_tokenizers.Sequence(parts)  # type: ignore[return-value]


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[return-value]


_PRE_TOKENIZERS = {"smollm": _smollm}
