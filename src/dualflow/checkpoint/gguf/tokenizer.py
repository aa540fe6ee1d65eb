"""The tokenizer, its control tokens and the chat template in a GGUF file's metadata. No torch here.

Byte-level BPE (llama.cpp's model "gpt2") whose pre-tokenizer we know, and SentencePiece BPE (its
model "llama"); anything else is refused by name, because a text cut differently gives other ids and
a worse model without any error.
"""

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from dualflow.checkpoint.companions import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from dualflow.checkpoint.gguf.bpe import CUTS, bpe_backend
from dualflow.checkpoint.gguf.spm import spm_backend


class TokenKind(IntEnum):
    """What llama.cpp calls a token's type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_MODELS = {"gpt2": set(TokenKind) - {TokenKind.UNKNOWN, TokenKind.BYTE}, "llama": set(TokenKind)}
"""The kinds of tokens that each kind of tokenizer has."""

NAMED_TOKENS = {
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

END_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
    "<end_of_turn>", "</s>", "<EOT>", "<|endofturn|>",
)  # fmt: skip
"""Control tokens that end a text or a turn wherever they occur, whatever the file names."""

_FILL_IN_KEYS = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
                 "prefix", "suffix", "middle")  # fmt: skip

_TABLES = "model", "pre", "tokens", "token_type", "merges", "scores"

TOKENIZER_KEYS = frozenset(
    [f"tokenizer.ggml.{name}" for name in _TABLES]
    + [f"tokenizer.ggml.{name}" for name in (*NAMED_TOKENS.values(), *_END_KEYS)]
    + [f"tokenizer.ggml.{name}_token_id" for name in _FILL_IN_KEYS]
    + [f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "space_prefix")]
    + ["tokenizer.chat_template", "tokenizer.chat_templates"]
)
"""Every key of the tokenizer's that is read; those of fill-in tokens change nothing here."""

TOKENIZER_PREFIXES = ("tokenizer.chat_template.",)
"""Keys that begin so are templates for special uses, which are left behind."""


def import_tokenizer(metadata: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """The companion files of a model folder (by name, as text), and how many ids are real.

    The files are tokenizer.json; tokenizer_config.json, with the names of the special tokens;
    generation_config.json, with every id that ends a text; and chat_template.jinja where the file
    has a template (the one without a name, where there are several). Ids from the second result on
    only pad the vocabulary. Where the file asks for BOS before or EOS after every text,
    tokenizer.json has a post-processor that adds them.

    Raises ``ValueError``: another kind of tokenizer or pre-tokenizer, missing or inconsistent keys.
    """
    model = _required(metadata, "model", str)
    if model not in _MODELS:
        raise ValueError(
            f"tokenizer.ggml.model is {model!r}, which is not supported; supported: 'gpt2' "
            "(byte-level BPE), 'llama' (SentencePiece BPE)"
        )
    tokens, kinds = _vocabulary(metadata, model)
    count = len(tokens)
    while count and kinds[count - 1] == TokenKind.UNUSED:  # rows that only pad the matrices
        count -= 1
    tokens, kinds = tokens[:count], kinds[:count]
    backend, adds_bos = _backend(metadata, model, tokens, kinds)
    for special, of_kinds in (
        (True, (TokenKind.UNKNOWN, TokenKind.CONTROL)),
        (False, (TokenKind.USER_DEFINED,)),
    ):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in of_kinds
        ]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    _check_ids(backend, tokens)
    names = _named(metadata, tokens)
    adds = {
        "bos": _flag(metadata, "add_bos_token", adds_bos),
        "eos": _flag(metadata, "add_eos_token", False),
    }
    if any(adds.values()):
        backend.post_processor = _template(adds, names, backend)  # type: ignore[assignment]
        names |= {f"add_{name}_token": True for name, wanted in adds.items() if wanted}
    files = {
        TOKENIZER: backend.to_str(pretty=False),
        **_other_files(metadata, names, tokens, kinds),
    }
    return files, count


def _backend(
    metadata: Mapping[str, Any], model: str, tokens: list[str], kinds: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer without its added tokens, and whether BOS is added where the file is silent."""
    if model == "gpt2":
        pre = _required(metadata, "pre", str)
        backend = bpe_backend(tokens, _required(metadata, "merges", list), pre)
        if _flag(metadata, "add_space_prefix", False):
            raise ValueError(
                "tokenizer.ggml.add_space_prefix is set, which is not supported for byte-level BPE"
            )
        return backend, CUTS[pre].adds_bos
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre != "default":
        raise ValueError(f"tokenizer.ggml.pre is {pre!r}; expected 'default' for model 'llama'")
    scores = _required(metadata, "scores", list)
    if len(scores) < len(tokens) or not all(type(x) is float and x == x for x in scores):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores):,} entries for {len(tokens):,} tokens; "
            "expected a number for each"
        )
    unknown = [
        token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenKind.UNKNOWN
    ]
    mergeable = [kind == TokenKind.NORMAL for kind in kinds]
    prefix = _flag(metadata, "add_space_prefix", True)
    return spm_backend(tokens, scores, mergeable, next(iter(unknown), None), prefix), True


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if type(value) is not bool:
        raise ValueError(f"tokenizer.ggml.{name} is {value!r}; expected true or false")
    return value


def _template(
    adds: Mapping[str, bool], names: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> processors.TemplateProcessing:
    """What puts BOS before and EOS after each text."""
    tokens: dict[str, str] = {}
    for name, wanted in adds.items():
        if wanted and f"{name}_token" not in names:
            raise ValueError(f"tokenizer.ggml.add_{name}_token is set, but no {name}_token_id")
        tokens[name] = names[f"{name}_token"] if wanted else ""
    single = [part for part in (tokens["bos"], "$A", tokens["eos"]) if part]
    second = [part.replace("$A", "$B") + ":1" for part in single]
    special = [(token, backend.token_to_id(token)) for token in tokens.values() if token]
    return processors.TemplateProcessing(
        single=single, pair=[*(f"{part}:0" for part in single), *second], special_tokens=special
    )


def _required(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, kind):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"tokenizer.ggml.{name} is {found}; expected a {kind.__name__}")
    return value


def _vocabulary(metadata: Mapping[str, Any], model: str) -> tuple[list[str], list[int]]:
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
        if kind not in _MODELS[model]:
            name = TokenKind(kind).name.lower() if kind in set(TokenKind) else kind
            raise ValueError(
                f"token {number} ({token!r}) is of type {name!r}, which a "
                f"tokenizer of the model {model!r} does not have"
            )
    return tokens, kinds


def _check_ids(backend: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """An added token that is no entry of the vocabulary would get an id of its own."""
    wrong = [token for number, token in enumerate(tokens) if backend.token_to_id(token) != number]
    if wrong or backend.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise ValueError(f"the tokenizer gives other ids than the file, as for {wrong[:3]!r}")


def _named(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """The special tokens by Hugging Face's names."""
    names: dict[str, Any] = {}
    for name, key in NAMED_TOKENS.items():
        number = _id(metadata, key, len(tokens))
        if number is not None:
            names[f"{name}_token"] = tokens[number]
    if "eos_token" not in names:
        raise ValueError("tokenizer.ggml.eos_token_id is missing: nothing says where a text ends")
    return names


def _other_files(
    metadata: Mapping[str, Any], names: dict[str, Any], tokens: list[str], kinds: list[int]
) -> dict[str, str]:
    ends = [_id(metadata, key, len(tokens)) for key in _END_KEYS]
    known = {
        name: number for number, name in enumerate(tokens) if kinds[number] == TokenKind.CONTROL
    }
    ends += [known.get(name) for name in END_NAMES]
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
