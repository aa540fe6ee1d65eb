"""A tokenizer, the names of its special tokens and its chat template as GGUF metadata. No torch
here.

What is written is read back by ``gguf_tokenizer`` and compared, so a tokenizer that a file cannot
express is refused and never written as another one.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers

from dualflow.checkpoint.companions import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from dualflow.checkpoint.gguf.bpe import CUTS
from dualflow.checkpoint.gguf.spm import scores_of
from dualflow.checkpoint.gguf.tokenizer import END_NAMES, NAMED_TOKENS, TokenKind, import_tokenizer
from dualflow.data.tokenizers import Tokenizer

_ARRAYS = "tokens", "token_type", "merges", "scores"


class _Vocabulary(NamedTuple):
    """Texts and kinds by id; ``added``: ids of the added tokens, and whether each is special."""

    tokens: list[str]
    kinds: list[int]
    added: dict[int, bool]


def export_tokenizer(companions: Mapping[str, str], rows: int) -> dict[str, Any]:
    """The keys ``tokenizer.*`` of a file whose embedding has ``rows`` rows.

    companions: the files of a model folder by name, as text.

    Raises ``ValueError``: there is no tokenizer.json, it has more ids than ``rows``, or llama.cpp's
    tokenizers cannot do what it does.
    """
    if TOKENIZER not in companions:
        raise ValueError("the model has no tokenizer.json, which a GGUF file needs")
    config = _table(companions, TOKENIZER_CONFIG)
    try:
        table = json.loads(companions[TOKENIZER])
        named = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
        tokenizer = Tokenizer.from_json(companions[TOKENIZER], named.get("eos_token"))
        backend = tokenizers.Tokenizer.from_str(companions[TOKENIZER])
    except (ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"tokenizer.json cannot be used: {error}") from error
    named["eos_token"] = tokenizer.eos_token
    if table["model"].get("type") != "BPE":
        raise ValueError(
            f"tokenizer.json has a model of type {table['model'].get('type')!r}; a GGUF file can "
            "express BPE"
        )
    spm = (table.get("decoder") or {}).get("type") != "ByteLevel"
    vocabulary = _vocabulary(table, rows, spm)
    _check_added(table, backend)
    metadata = _model(table, vocabulary, spm)
    for name, key in NAMED_TOKENS.items():
        if (number := tokenizer.id_of(named.get(f"{name}_token") or "")) is not None:
            metadata[key] = number
    metadata |= _ends(companions, vocabulary.tokens, metadata["eos_token_id"])
    metadata |= _adds(backend, metadata)
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    template = companions.get(CHAT_TEMPLATE) or config.get("chat_template")
    if isinstance(template, str):
        keys["tokenizer.chat_template"] = template
    return _checked(keys, table, backend)


def _table(companions: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        table = json.loads(companions.get(name, "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not usable JSON: {error}") from error
    return table if isinstance(table, dict) else {}


def _content(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _vocabulary(table: Mapping[str, Any], rows: int, spm: bool) -> _Vocabulary:
    model, by_id = (
        table["model"],
        {number: text for text, number in table["model"]["vocab"].items()},
    )
    added: dict[int, bool] = {}
    for token in table.get("added_tokens", ()):
        number = token["id"]
        by_id[number] = _plain(token)
        added[number] = token["special"]
    if by_id and max(by_id) >= rows:
        raise ValueError(f"tokenizer.json has the id {max(by_id):,}; the model has {rows:,} rows")
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(rows)]
    kinds = [TokenKind.NORMAL if number in by_id else TokenKind.UNUSED for number in range(rows)]
    for number, special in added.items():
        kinds[number] = TokenKind.CONTROL if special else TokenKind.USER_DEFINED
    if spm:
        names = {f"<0x{byte:02X}>": TokenKind.BYTE for byte in range(256)}
        names = names if model.get("byte_fallback") else {}
        for text, kind in (*names.items(), (model.get("unk_token"), TokenKind.UNKNOWN)):
            if (number := model["vocab"].get(text)) is not None:
                kinds[number] = kind
    return _Vocabulary(tokens, [int(kind) for kind in kinds], added)


def _check_added(table: Mapping[str, Any], backend: tokenizers.Tokenizer) -> None:
    """Added tokens are found in the text as it stands, and take nothing of what is around them."""
    normalizer: Any = backend.normalizer
    for token in table.get("added_tokens", ()):
        text = token["content"]
        found = [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        if token.get("normalized") and normalizer and normalizer.normalize_str(text) != text:
            found.append("normalized")
        if found:
            raise ValueError(
                f"the added token {text!r} has {found[0]} set, which a GGUF file cannot express"
            )


def _model(table: Mapping[str, Any], vocabulary: _Vocabulary, spm: bool) -> dict[str, Any]:
    """What kind of tokenizer it is, and its lists. Of byte-level ones the first cut that reads back
    the same is found by trying.
    """
    pairs = _merges(table)
    if not pairs:
        raise ValueError("tokenizer.json has no merges, without which llama.cpp takes no tokenizer")
    lists = {"tokens": vocabulary.tokens, "token_type": vocabulary.kinds}
    if spm:
        prefix = "Prepend" in json.dumps(table.get("normalizer"))
        return {"model": "llama", "pre": "default", **lists, "add_space_prefix": prefix,
                "scores": scores_of(vocabulary.tokens, pairs)}  # fmt: skip
    merges = [" ".join(pair) for pair in pairs]
    wanted = _behaviour(table)
    for pre in CUTS:
        # The cut does not depend on the vocabulary: an empty one tells.
        found = import_tokenizer(_PROBE | {"tokenizer.ggml.pre": pre})[0]
        if _cut_of(_behaviour(json.loads(found[TOKENIZER]))) == _cut_of(wanted):
            return {"model": "gpt2", "pre": pre, **lists, "merges": merges}
    raise ValueError(
        "tokenizer.json cuts texts in a way that we know no llama.cpp pre-tokenizer for; known: "
        f"those of {', '.join(CUTS)}"
    )


_PROBE: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["<e>"],
    "tokenizer.ggml.token_type": [3], "tokenizer.ggml.merges": [], "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
}  # fmt: skip


def _ends(companions: Mapping[str, str], tokens: list[str], eos: int) -> dict[str, int]:
    """Ids that end a text beside EOS, where their names do not say so already."""
    listed: Any = _table(companions, GENERATION_CONFIG).get("eos_token_id", [])
    ids = [number for number in (listed if isinstance(listed, list) else [listed])
           if type(number) is int and 0 <= number < len(tokens) and number != eos
           and tokens[number] not in END_NAMES]  # fmt: skip
    if len(ids) > 2:
        raise ValueError(
            f"generation_config.json names {len(ids)} ends of a text beside EOS and those that are "
            "known by name; a GGUF file can express two"
        )
    return dict(zip(("eot_token_id", "eom_token_id"), ids, strict=False))


def _adds(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the tokenizer puts BOS before and EOS after a text; anything else is refused. A token
    before every text is BOS, where nothing names another.
    """
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    named, eos = metadata.get("bos_token_id"), metadata["eos_token_id"]
    bos = whole[0] if named is None and len(whole) > len(bare) else named
    for adds_bos in (False, True):
        for adds_eos in (False, True):
            if whole == [bos] * adds_bos + bare + [eos] * adds_eos:
                found: dict[str, Any] = {"add_bos_token": adds_bos}
                found |= {"add_eos_token": True} if adds_eos else {}
                return {**found, "bos_token_id": bos} if adds_bos else found
    raise ValueError(
        f"tokenizer.json makes {whole} of a text of the ids {bare}; a GGUF file can express BOS "
        f"({bos}) before it and EOS ({eos}) after it"
    )


def _checked(
    keys: dict[str, Any], table: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> dict[str, Any]:
    """``keys``, if they read back as the tokenizer that they were made of."""
    try:
        read = json.loads(import_tokenizer(keys)[0][TOKENIZER])
    except ValueError as error:
        raise ValueError(f"a GGUF file cannot express tokenizer.json: {error}") from error
    ours, theirs = _behaviour(table), _behaviour(read)
    for part, wanted in ours.items():
        if theirs[part] != wanted:
            raise ValueError(
                f"a GGUF file cannot express the {part} of tokenizer.json: it would come back "
                f"{_difference(wanted, theirs[part])}"
            )
    return keys


def _difference(wanted: Any, found: Any) -> str:
    if isinstance(wanted, list) and isinstance(found, list):
        for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
            if one != other:
                return f"as {other!r} where it has {one!r} (entry {number:,})"
        return f"with {len(found):,} entries, of {len(wanted):,}"
    return f"as {str(found)[:100]}, it is {str(wanted)[:100]}"


def _merges(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in table["model"]["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        merges.append((left, right))
    return merges


def _behaviour(table: Mapping[str, Any]) -> dict[str, Any]:
    """What decides ids and texts, written in one way. Merges that make or need an added token are
    left out: the token is found before any merge is looked for.
    """
    model = table["model"]
    added = {token["id"]: token for token in table.get("added_tokens", ())}
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {number: _plain(token) for number, token in added.items()}
    whole = {token["content"] for token in added.values()} | {texts[number] for number in added}
    byte_fallback = bool(model.get("byte_fallback"))
    return {
        "vocabulary": sorted(texts.items()),
        "merges": [
            pair for pair in _merges(table) if not whole.intersection((*pair, "".join(pair)))
        ],
        "added tokens": sorted((number, token["special"]) for number, token in added.items()),
        "model": [
            bool(model.get("ignore_merges")), byte_fallback,
            model.get("unk_token") if byte_fallback else None,
            model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or "",
            model.get("dropout") or 0,
        ],
        "normalizer": _steps(table.get("normalizer"), "normalizers"),
        "pre-tokenizer": [
            step for step in _steps(table.get("pre_tokenizer"), "pretokenizers")
            if not (_replaces_spaces(table) and step.get("pattern") == {"String": " "})
        ],
        "decoder": _steps(table.get("decoder"), "decoders"),
    }  # fmt: skip


def _plain(token: Mapping[str, Any]) -> str:
    """The text of an added token as it stands in a text. SentencePiece's runs of spaces are looked
    for before spaces are replaced.
    """
    return token["content"] if token["special"] else token["content"].replace("▁", " ")


def _replaces_spaces(table: Mapping[str, Any]) -> bool:
    """Whether no space is left for the pre-tokenizer to find (Gemma's looks for some)."""
    steps = _steps(table.get("normalizer"), "normalizers")
    return any(step.get("pattern") == {"String": " "} for step in steps)


def _cut_of(behaviour: Mapping[str, Any]) -> tuple[Any, ...]:
    return behaviour["normalizer"], behaviour["pre-tokenizer"], behaviour["model"][0]


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a chain, without fields that change no id and no text."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for one in part[inner] for step in _steps(one, inner)]
    step = {key: value for key, value in part.items() if key != "trim_offsets"}
    if inner == "decoders" and step["type"] == "ByteLevel":
        return [{"type": "ByteLevel"}]
    return [step]
