"""Text to ids and back: bytes, a BPE trained here, a ``tokenizer.json``. No torch here.

All three are one ``tokenizers`` object, so there is one way to encode and one file to save. Text is
encoded as it is: nothing is normalised by the tokenizers made here, every byte sequence that is
UTF-8 comes back unchanged, and control tokens written out in a text stay plain characters unless
the caller asks otherwise.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from dualflow.data.config import SPECIAL_TOKENS, bpe_size
from dualflow.folders import expand_home

# How tokenizer files of well-known families call their end of text, most specific first.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# A crafted file may hold an id so high that the library takes all memory to write it down.
_LARGEST_VOCABULARY = 1 << 24
_LONG_TEXT = 1 << 18
_GROUP = 1 << 20


class Tokenizer:
    """A ``tokenizers.Tokenizer`` whose end of text is known and that drops and adds nothing; what
    belongs before a whole text is ``before_ids``.

    ``stop_ids`` are all ids at which generation ends: ``eos_id``, and those that end a turn of a
    chat where they are others.

    Raises ``ValueError`` where ``eos_token`` is None and the tokenizer has none of the usual ones,
    or lacks ``eos_token`` or one of ``stop_ids``.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token: str | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self._backend = backend
        self._lock = threading.RLock()
        # A file may ask for truncation or padding; both would silently change what is trained on.
        backend.no_truncation()
        backend.no_padding()
        if self.vocab_size > _LARGEST_VOCABULARY:
            raise ValueError(
                f"the tokenizer has the id {self.vocab_size - 1}; expected less than "
                f"{_LARGEST_VOCABULARY}"
            )
        self.eos_token = eos_token or next(
            (name for name in _EOS_NAMES if self.id_of(name) is not None), None
        )
        eos_id = None if self.eos_token is None else self.id_of(self.eos_token)
        if eos_id is None:
            wanted = eos_token or f"any of {', '.join(_EOS_NAMES)}"
            raise ValueError(
                f"the tokenizer has no end-of-text token ({wanted}); set eos_token to the one it "
                "uses"
            )
        self.eos_id: int = eos_id
        self.stop_ids: frozenset[int] = frozenset({eos_id, *stop_ids})
        if wrong := [number for number in self.stop_ids if not 0 <= number < self.vocab_size]:
            raise ValueError(
                f"the end-of-text id {wrong[0]} is not in the vocabulary of {self.vocab_size} ids"
            )

    @classmethod
    def from_json(
        cls, text: str, eos_token: str | None = None, stop_ids: Iterable[int] = ()
    ) -> "Tokenizer":
        """The tokenizer a ``tokenizer.json`` holds. Raises ``ValueError`` where it is not one."""
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer.json ({error})") from error
        return cls(backend, eos_token, stop_ids)

    def to_json(self) -> str:
        """The whole tokenizer as the text of a ``tokenizer.json``."""
        return self._backend.to_str(pretty=False)

    @cached_property
    def vocab_size(self) -> int:
        """Rows an embedding needs: the highest id + 1, above the count where ids have gaps."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        return frozenset(self.special_tokens.values())

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the control tokens by name."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def before_ids(self) -> list[int]:
        """What stands before a text, by the tokenizer's own post-processor: the beginning-of-text
        token of Llama 2, Llama 3 or Gemma; nothing for most.
        """
        with self._lock:
            plain = self._backend.encode("a", add_special_tokens=False).ids
            whole = self._backend.encode("a").ids
        after = len(whole) - len(plain)
        starts = [at for at in range(after + 1) if whole[at : at + len(plain)] == plain]
        return whole[: starts[0]] if starts else []

    def id_of(self, token: str) -> int | None:
        """The id of one token by its name, None where there is no such token."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of ``text``; with ``special``, names of control tokens in it become the tokens."""
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """``encode`` of many texts at once, in parallel."""
        return [ids.tolist() for ids in self.encode_arrays(texts, special)]

    def encode_arrays(
        self, texts: Sequence[str], special: bool = False
    ) -> list[NDArray[np.uint32]]:
        """``encode_batch`` with ids as arrays of 4 bytes each, for texts that fill the memory."""
        if self._is_bytes and not special:
            return [np.frombuffer(t.encode("utf-8"), np.uint8).astype(np.uint32) for t in texts]
        pieces = [self._pieces(text, special) for text in texts]
        # The library keeps this switch with the tokenizer: without the lock another thread's text
        # could be read with it.
        with self._lock:
            self._backend.encode_special_tokens = not special
            ids = self._encode_pieces(piece for of_text in pieces for piece in of_text)
            return [np.concatenate([next(ids) for _ in of_text]) for of_text in pieces]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of ``ids``; bytes that are no whole character become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def _encode_pieces(self, pieces: Iterable[str]) -> Iterator[NDArray[np.uint32]]:
        """Ids of each piece; a group at a time, as the library keeps some 100 bytes a token."""
        group: list[str] = []
        size = 0
        for piece in pieces:
            group.append(piece)
            size += len(piece)
            if size >= _GROUP:
                yield from self._encode_group(group)
                group, size = [], 0
        yield from self._encode_group(group)

    def _encode_group(self, group: list[str]) -> Iterator[NDArray[np.uint32]]:
        for encoding in self._backend.encode_batch_fast(group, add_special_tokens=False):
            yield np.array(encoding.ids, np.uint32)

    def _pieces(self, text: str, special: bool) -> list[str]:
        pieces = [text]
        if not special and self._reads_control_names:
            pieces = _cut_inside(text, self._control_names)
        return [cut for piece in pieces for cut in self._cut_long(piece)]

    def _cut_long(self, text: str) -> list[str]:
        """Pieces of a very long text, which would take much memory, with the ids of the whole."""
        if len(text) <= 2 * _LONG_TEXT or not self._may_cut:
            return [text]
        cuts, start = [0], 0
        while (match := _CUT.search(text, start + _LONG_TEXT)) is not None:
            start = match.start() + 1
            cuts.append(start)
        return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]

    @cached_property
    def _is_bytes(self) -> bool:
        """Whether this is ``bytes_tokenizer``, of which the ids are known without looking."""
        return self.to_json() == bytes_tokenizer().to_json()

    @cached_property
    def _control_names(self) -> re.Pattern[str]:
        return re.compile(
            "|".join(re.escape(name) for name in sorted(self.special_tokens, key=len, reverse=True))
        )

    @cached_property
    def _reads_control_names(self) -> bool:
        """Whether the model itself (Unigram, WordPiece, ...) reads a control token's name as it."""
        names = [name for name in self.special_tokens if len(name) > 1]
        with self._lock:
            self._backend.encode_special_tokens = True
            encodings = self._backend.encode_batch_fast(names, add_special_tokens=False)
        return any(self.special_ids.intersection(encoding.ids) for encoding in encodings)

    @cached_property
    def _may_cut(self) -> bool:
        """Whether a text cut before a line break has the ids of the whole."""
        whole, *parts = (
            self._backend.encode(t, add_special_tokens=False).ids for t in ("a\nb a", "a", "\nb a")
        )
        return whole == [token for part in parts for token in part]


# Between a letter and a line break: no pre-tokenizer in use joins what stands on both sides.
_CUT = re.compile(r"[A-Za-z](?=\r?\n)")


def _cut_inside(text: str, names: re.Pattern[str]) -> list[str]:
    """``text`` cut behind the first character of every name, so that no piece holds one."""
    cuts = [0, *(match.start() + 1 for match in names.finditer(text)), len(text)]
    return [text[a:b] for a, b in pairwise(cuts) if a < b]


def bytes_tokenizer() -> Tokenizer:
    """Id = byte for 0..255, then the control tokens: 259 ids."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = _byte_level(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    )
    return Tokenizer(backend)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly ``vocab_size`` ids, control tokens first; deterministic.

    Raises ``ValueError`` where the texts hold too little to make that many ids from.
    """
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS
        ],
        initial_alphabet=_byte_characters(),
        show_progress=False,
    )
    _interruptibly(lambda: backend.train_from_iterator(texts, trainer))
    found = backend.get_vocab_size()
    if found != vocab_size:
        raise ValueError(
            f"the training text is too short for a vocabulary of {vocab_size} ids: it gave "
            f"{found}; "
            f"use bpe:{found} or bytes, or give more text"
        )
    return Tokenizer(backend)


def _interruptibly(work: Callable[[], None]) -> None:
    """Run ``work``, long and out of Python's sight, in a thread: Ctrl-C is heard meanwhile."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # raised again below, where it belongs
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    ended.result()


def load_tokenizer(name: str | Path, eos_token: str | None = None) -> Tokenizer:
    """``bytes``, or the ``tokenizer.json`` at a path or in the folder at a path.

    A ``tokenizer_config.json`` beside it is read for the end-of-text token alone, a
    ``generation_config.json`` for ``stop_ids`` alone. ``bpe:N`` is not loaded but trained
    (``dualflow.data.prepare``). Raises ``FileNotFoundError`` where there is no such file.
    """
    if str(name) == "bytes":
        return bytes_tokenizer()
    if bpe_size(str(name)) is not None:
        raise ValueError(
            f"tokenizer {name!r} has to be trained on a text; run: dualflow data prepare SOURCE "
            f"--tokenizer {name}"
        )
    path = tokenizer_file(name)
    try:
        return Tokenizer.from_json(
            path.read_text(encoding="utf-8"),
            eos_token or configured_eos(path.parent),
            configured_stop_ids(path.parent),
        )
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


def tokenizer_file(name: str | Path) -> Path:
    """The ``tokenizer.json`` that a path means; ``FileNotFoundError`` says where it looked."""
    path = expand_home(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"tokenizer {str(name)!r}: no file {file.name} in {file.parent}; expected bytes, bpe:N "
            "or the path of a tokenizer.json"
        )
    return file


def configured_eos(folder: Path) -> str | None:
    """The end-of-text token that a ``tokenizer_config.json`` in ``folder`` names, if any."""
    return named_tokens(folder).get("eos_token")


def named_tokens(folder: Path) -> dict[str, str]:
    """The special tokens (``bos_token``, ``eos_token``, ...) that a ``tokenizer_config.json`` in
    ``folder`` names; empty where there is none that can be read.
    """
    found: dict[str, str] = {}
    for name, token in read_table(folder / "tokenizer_config.json").items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def configured_stop_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a text by a ``generation_config.json`` in ``folder``, where there is one."""
    ids: Any = read_table(folder / "generation_config.json").get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return tuple(number for number in listed if type(number) is int)


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object in one of a tokenizer's files; empty where it is missing or not one."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    # The library's stubs leave these attributes untyped.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return backend


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2), by byte.

    Printable bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
