"""Text that must have a shape: which tokens may come next by a schema, a pattern or a grammar.

The parsing is llguidance's (extra ``structured``): it needs nothing else, computes the tokens that
are allowed while the text is written, and bounds the work of each step.
"""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualflow.data.tokenizers import Tokenizer
from dualflow.engine.penalties import common_prefix
from dualflow.engine.request import RequestError, StructuredOutput
from dualflow.extras import require_extra

_LARGEST = 1 << 18
"""Characters that a schema, pattern or grammar may have: what is larger takes long to read."""

_REMEMBERED = 32
"""Compiled shapes that are kept: requests that share one compile it once."""

_MOST_MULTIPLES, _DIGITS = 20_000, 12
"""How large a JSON schema's ``multipleOf`` may be, and how many orders of magnitude apart."""

# White space between JSON's tokens never ends a text by itself, so a model must not be able to
# write it for ever. A schema may state another pattern under "x-guidance".
_JSON_DEFAULTS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}


class StructuredOutputs:
    """Compiles shapes for one tokenizer and hands out their states, one for each sequence.

    ``vocab_size`` is the length V of the model's rows; ids the tokenizer does not know are never
    allowed. May be used from several threads.

    Raises ``MissingExtraError`` where llguidance is not installed, and ``ValueError`` where it
    cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._library = require_extra("llguidance", "structured", "structured output")
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[StructuredOutput, Any] = OrderedDict()
        self._lock = threading.Lock()

    def start(
        self, shape: StructuredOutput, stop_ids: frozenset[int] = frozenset()
    ) -> "ShapedText":
        """The state of an empty text. Control tokens among ``stop_ids`` end it as the tokenizer's
        end-of-text id does.

        Raises ``RequestError`` where the shape cannot be read, or nothing has it.
        """
        with self._lock:
            matcher = self._compiled.get(shape)
            if matcher is None:
                matcher = self._compiled[shape] = self._compile(shape)
            self._compiled.move_to_end(shape)
            if len(self._compiled) > _REMEMBERED:
                self._compiled.popitem(last=False)
            ends = {self._tokenizer.eos_id} | (stop_ids & self._tokenizer.special_ids)
            return ShapedText(matcher.deep_copy(), self._vocab_size, frozenset(ends))

    @cached_property
    def _vocabulary(self) -> Any:
        """The library's view of the tokenizer; about a second's work for a large one."""
        tokenizer = self._tokenizer
        try:
            return self._library.LLTokenizer(
                tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=tokenizer.eos_id
            )
        except Exception as error:  # the library's errors are not typed
            raise ValueError(
                f"structured output cannot use this tokenizer ({_one_line(error)}); "
                "byte-level and byte-fallback tokenizers can be"
            ) from error

    def _compile(self, shape: StructuredOutput) -> Any:
        if len(shape.value) > _LARGEST:
            raise RequestError(
                f"the {_NAMES.get(shape.kind, shape.kind)} has {len(shape.value):,} characters; "
                f"expected at most {_LARGEST:,}"
            )
        matcher = self._library.LLMatcher(
            self._vocabulary, _grammar(self._library, shape), log_level=0
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # where no text has the shape, it shows here
        if matcher.is_error():
            reason = _one_line(matcher.get_error())
            if reason.startswith("NoExtension"):
                reason = "no text has this shape"
            raise _unreadable(shape, reason)
        return matcher


class ShapedText:
    """Where one text stands in its shape: a ``sampler.GrammarState``.

    The end is allowed exactly where the text has its shape already, and nothing but the end
    follows it.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._size = vocab_size
        self._end_ids = end_ids
        self._ends = torch.tensor(sorted(i for i in end_ids if i < vocab_size))
        self._written: list[int] = []
        self._mask: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether the text has its shape as it stands."""
        return self.ended or self._matcher.is_accepting()

    def allowed(self, output_ids: Sequence[int]) -> Tensor:
        """Which ids may follow ``output_ids``, bool [V]; read it before the next call.

        Raises ``RequestError`` where ``output_ids`` is not of the shape, or too hard to go on from.
        """
        self._follow(output_ids)
        if self._mask is None:
            self._mask = self._next_mask()
        return self._mask

    def accept(self, token_id: int) -> None:
        """Go on by one token. Raises ``RequestError`` where it is not allowed."""
        if self.ended:
            fits = token_id in self._end_ids
        elif token_id in self._end_ids:
            fits = self._matcher.is_accepting()
        else:
            fits = self._matcher.consume_token(token_id)
        if not fits:
            reason = _one_line(self._matcher.get_error()) or "it is not allowed here"
            raise RequestError(
                f"the structured output cannot go on with token {token_id}: {reason}"
            )
        self._written.append(token_id)
        self._mask = None

    @property
    def ended(self) -> bool:
        """Whether the last token was the end: nothing may follow."""
        return bool(self._written) and self._written[-1] in self._end_ids

    def _follow(self, output_ids: Sequence[int]) -> None:
        shared = common_prefix(self._written, output_ids)
        if shared < len(self._written):
            gone = sum(token not in self._end_ids for token in self._written[shared:])
            assert self._matcher.rollback(gone)
            del self._written[shared:]
            self._mask = None
        for token in output_ids[shared:]:
            self.accept(token)

    def _next_mask(self) -> Tensor:
        mask_V = np.zeros(self._size, np.bool_)
        if not self.ended and not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            known = np.unpackbits(bits, bitorder="little")[: self._size]
            mask_V[: len(known)] = known
        if self._matcher.is_error():
            raise RequestError(
                "the structured output cannot go on from here: "
                f"{_one_line(self._matcher.get_error())}"
            )
        out_V = torch.from_numpy(mask_V)
        out_V[self._ends] = self.complete
        return out_V


_NAMES = {
    "json_schema": "JSON schema",
    "json": "JSON",
    "regex": "regular expression",
    "grammar": "grammar",
}


def _grammar(library: ModuleType, shape: StructuredOutput) -> str:
    """The shape in the library's own form."""
    matcher = library.LLMatcher
    try:
        match shape.kind:
            case "json":
                return matcher.grammar_from_json_schema("{}", defaults=_JSON_DEFAULTS)
            case "json_schema":
                _require_schema(shape)
                return matcher.grammar_from_json_schema(shape.value, defaults=_JSON_DEFAULTS)
            case "regex":
                return matcher.grammar_from_regex(shape.value)
            case "grammar":
                if "%json" in shape.value and "multipleOf" in shape.value:
                    raise _unreadable(shape, "multipleOf is not supported in a schema inside of it")
                return library.grammar_from("grammar", shape.value)
    except RequestError:
        raise
    except ValueError as error:
        raise _unreadable(shape, _one_line(error)) from error
    raise RequestError(
        f"structured output is of kind {shape.kind!r}; expected one of {', '.join(_NAMES)}"
    )


def _require_schema(shape: StructuredOutput) -> None:
    try:
        schema = json.loads(shape.value)
        states = _multiples(schema)
    except (ValueError, RecursionError) as error:
        raise _unreadable(shape, f"it is not JSON ({error})") from error
    if not isinstance(schema, dict | bool):
        raise _unreadable(shape, f"it is {type(schema).__name__}, expected an object")
    if states > _MOST_MULTIPLES:
        raise _unreadable(
            shape,
            f"its multipleOf have the common multiple {states:,} in units of their last decimal; "
            f"expected at most {_MOST_MULTIPLES:,}",
        )


def _multiples(schema: Any) -> int:
    """The least common multiple of all ``multipleOf``, in units of the finest: the library makes
    that many states of them at once, without a limit of its own.
    """
    numbers = [Decimal(str(n)) for n in _values(schema, "multipleOf") if type(n) in (int, float)]
    parts = [number.normalize().as_tuple() for number in numbers if number.is_finite()]
    exponents = [part.exponent for part in parts if isinstance(part.exponent, int)]
    finest = min(exponents, default=0)
    if max(exponents, default=0) - finest > _DIGITS:
        return 10**_DIGITS
    scaled = (abs(int(number.scaleb(-finest))) for number in numbers if number.is_finite())
    return math.lcm(*(number for number in scaled if number))


def _values(node: Any, key: str) -> Iterator[Any]:
    if isinstance(node, dict):
        if key in node:
            yield node[key]
        node = node.values()
    elif not isinstance(node, list):
        return
    for part in node:
        yield from _values(part, key)


def _unreadable(shape: StructuredOutput, reason: str) -> RequestError:
    return RequestError(f"the {_NAMES[shape.kind]} cannot be used: {reason}")


def _one_line(error: object) -> str:
    text = " ".join(str(error).partition("<state>")[0].split())
    return text if len(text) <= 300 else text[:297] + "..."
