r"""The prompts of a batch: a JSON object a line, checked as a whole before anything runs.

    {"id": "a", "prompt": "def main(", "max_tokens": 20}
    {"prompt_ids": [5, 17], "temperature": 0, "aux": "exact"}
    {"messages": [{"role": "user", "content": "Hello"}], "stop": ["\n"]}

One of ``prompt``, ``prompt_ids`` and ``messages``; an ``id`` (text or number) where the line number
is not name enough; any field of ``cli.request_fields``, which the command's options are defaults
for. Blank lines are passed over.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualflow.cli.request_fields import Fields, build_params, check_names, merged

if TYPE_CHECKING:
    from dualflow.engine.request import RequestParams

KINDS = ("prompt", "prompt_ids", "messages")
SEED_END = 2**63


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """One line of the input.

    line:        its number, from 1.
    id:          what it calls itself, None where it does not.
    prompt:      a text, ids, or messages, as ``kind`` says.
    input_hash:  of everything that decides its result.
    """

    line: int
    id: str | int | None
    kind: str
    prompt: Any
    params: "RequestParams"
    input_hash: str

    @property
    def key(self) -> tuple[str, str | int]:
        """What tells it from other lines."""
        return key_of(self.id, self.line)


class BadLinesError(ValueError):
    """Lines that cannot be used: (number, what is wrong) in order."""

    def __init__(self, source: str, problems: list[tuple[int, str]]) -> None:
        many = "1 line" if len(problems) == 1 else f"{len(problems):,} lines"
        super().__init__(f"{source}: {many} cannot be used; nothing was run")
        self.problems = problems


def key_of(name: str | int | None, line: int) -> tuple[str, str | int]:
    """The key of a request by its id, or by its line where it has none."""
    return ("line", line) if name is None else ("id", name)


def read_requests(path: Path, defaults: Fields, salt: str = "") -> list[BatchRequest]:
    """The requests in ``path``.

    defaults:  fields of lines that do not say otherwise. With a ``seed`` here, each line without
               one has a seed of its own made of it and the line number.
    salt:      what else decides results, such as the model; part of every ``input_hash``.

    Raises ``BadLinesError`` with all lines that are wrong, ``ValueError`` where there are no lines,
    and ``OSError``.
    """
    requests: list[BatchRequest] = []
    problems: list[tuple[int, str]] = []
    lines_of: dict[tuple[str, str | int], int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                request = _request(number, line, defaults, salt)
                first = lines_of.setdefault(request.key, number)
                if first != number:
                    raise ValueError(f"the id {request.id!r} is that of line {first} already")
            except ValueError as error:
                problems.append((number, " ".join(str(error).split())))
            else:
                requests.append(request)
    if problems:
        raise BadLinesError(str(path), problems)
    if not requests:
        raise ValueError(f"{path} holds no prompts; expected a JSON object a line")
    return requests


def _request(number: int, line: bytes, defaults: Fields, salt: str) -> BatchRequest:
    record = _record(line)
    check_names(record, ("id", *KINDS))
    name = record.pop("id", None)
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise ValueError(f"id is {name!r}; expected a text or a whole number")
    given = [kind for kind in KINDS if record.get(kind) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise ValueError(f"found {found}; expected one of {', '.join(KINDS)}")
    kind, prompt = given[0], record[given[0]]
    _check_prompt(kind, prompt)
    own = {key: value for key, value in record.items() if key not in KINDS}
    fields = merged(_with_own_seed(defaults, number), own)
    return BatchRequest(
        line=number, id=name, kind=kind, prompt=prompt, params=build_params(fields),
        input_hash=_digest([salt, kind, prompt, fields]),
    )  # fmt: skip


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8").rstrip(), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} is 0x{line[error.start]:02x}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read (nested too deeply)") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    return record


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


def _check_prompt(kind: str, prompt: object) -> None:
    if kind == "prompt" and not isinstance(prompt, str):
        raise ValueError(f"prompt is {prompt!r}; expected a text")
    if kind == "prompt_ids" and not (
        isinstance(prompt, list) and prompt and all(type(i) is int and i >= 0 for i in prompt)
    ):
        raise ValueError("prompt_ids: expected a list of token ids, not empty")
    if kind == "messages" and not (
        isinstance(prompt, list) and prompt and all(_is_message(item) for item in prompt)
    ):
        raise ValueError(
            "messages: expected a list, not empty, of objects with a role and a content"
        )


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("role"), str)


def _with_own_seed(defaults: Fields, number: int) -> Fields:
    seed = defaults.get("seed")
    if seed is None:
        return defaults
    # Added, the seeds of neighbouring lines would meet where n is above 1.
    own = int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest())
    return {**defaults, "seed": own % (SEED_END - 256)}


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
