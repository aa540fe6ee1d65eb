"""Conversations to token ids through a model's chat template. No torch here.

Templates are Jinja and come with models, so they run in transformers' sandbox. What users write
stays text: a control token's name typed into a message is encoded as plain characters, and only the
template's own control tokens become the tokens. Where no message holds such a name the ids are
exactly those of transformers' ``apply_chat_template``.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2  # torch needs it too, so it is always there

from dualflow.data.tokenizers import Tokenizer, named_tokens, read_table
from dualflow.extras import require_extra

TEMPLATE_FILE = "chat_template.jinja"

_PURPOSE = "rendering chat templates"
_RESERVED = ("messages", "conversations", "tools", "documents", "chat_template",
             "add_generation_prompt", "continue_final_message",
             "return_assistant_tokens_mask")  # fmt: skip

# Code points that Unicode keeps for a program's own use: one that no message holds is our mark.
_MARKS = [chr(number) for number in (*range(0xFDD0, 0xFDF0), *range(0x10FF00, 0x10FFFE))]


class ChatError(ValueError):
    """A conversation that cannot be rendered: what is wrong with the messages or the template."""


class ChatTemplate:
    """A chat template and the tokenizer it writes for.

    source:  Jinja, as in ``chat_template.jinja``.
    tokens:  names of special tokens the template may ask for, such as ``bos_token``.

    Raises ``ChatError`` for a syntax error in the template, ``MissingExtraError`` where
    transformers is not there.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, tokens: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self._tokenizer = tokenizer
        self._tokens = {"eos_token": tokenizer.eos_token, **(tokens or {})}
        self._names = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or "(?!)")
        self._module = require_extra(
            "transformers.utils.chat_template_utils", "transformers", _PURPOSE
        )
        try:
            self._module.render_jinja_template([], chat_template=source)  # compiles it
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(
                f"the chat template has an error in line {error.lineno}: {error.message}"
            ) from error
        except ImportError as error:  # a jinja2 that is too old, say
            raise ChatError(f"chat templates cannot be used: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text, for people to look at: in it a control token and its name
        look alike. Arguments and errors are those of ``encode``.
        """
        asked = self._inputs(messages, tools, add_generation_prompt, variables)
        return self._render(asked)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a conversation.

        messages:              each with a ``role`` and a ``content``: a text, a list of text parts
                               (joined as they are), or None beside tool calls.
        tools:                 JSON schemas the template may show to the model.
        add_generation_prompt: end where the model's answer begins.
        variables:             further variables of this template, such as ``enable_thinking``.

        Raises ``ChatError``: a message is malformed, or the template refuses the conversation, with
        the template's own words.
        """
        asked = self._inputs(messages, tools, add_generation_prompt, variables)
        mark = _unused_mark(asked)
        marked = self._render(_Marker(mark, self._names, self._pattern).inputs(asked))
        text = marked.replace(mark, "")
        if self._places(marked, mark) == self._places(text, mark):
            return self._tokenizer.encode(text, special=True)
        ids: list[int] = []
        end = 0
        for match in self._pattern.finditer(marked):
            ids += self._tokenizer.encode(marked[end : match.start()].replace(mark, ""))
            ids.append(self._tokenizer.special_tokens[match.group()])
            end = match.end()
        return ids + self._tokenizer.encode(marked[end:].replace(mark, ""))

    def _places(self, text: str, mark: str) -> list[tuple[int, str]]:
        """Where control tokens stand in ``text``, marks not counted."""
        return [
            (match.start() - text.count(mark, 0, match.start()), match.group())
            for match in self._pattern.finditer(text)
        ]

    def _inputs(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> "_Inputs":
        for name in variables or {}:
            if name in _RESERVED or name in self._tokens:
                raise ChatError(f"the template variable {name!r} is set by dualflow; leave it out")
        checked = _check_messages(messages)
        listed = None if tools is None else [dict(tool) for tool in tools]
        return _Inputs(checked, listed, add_generation_prompt, dict(variables or {}))

    def _render(self, asked: "_Inputs") -> str:
        try:
            rendered, _ = self._module.render_jinja_template(
                [asked.messages],
                tools=asked.tools,
                chat_template=self.source,
                add_generation_prompt=asked.add_generation_prompt,
                **self._tokens,
                **asked.variables,
            )
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template refuses this conversation: {error}") from error
        except Exception as error:  # a template's code may raise anything
            raise ChatError(
                "the chat template cannot render this conversation: "
                f"{type(error).__name__}: {error}"
            ) from error
        try:
            rendered[0].encode("utf-8")
        except UnicodeEncodeError as error:  # JSON's escapes can make such texts
            raise ChatError(
                "a message holds half of a surrogate pair "
                f"(U+{ord(error.object[error.start]):04X}), which is no character"
            ) from error
        return rendered[0]


def load_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a model folder: ``chat_template.jinja``, else what its
    ``tokenizer_config.json`` holds.

    Raises ``ChatError``: there is none, or it cannot be used.
    """
    path = folder / TEMPLATE_FILE
    config = read_table(folder / "tokenizer_config.json")
    try:
        # Not read_text: a template's line ends are part of what it writes.
        source: Any = path.read_bytes().decode("utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ChatError(f"{path} cannot be read: {error}") from error
    if source is None:
        source = config.get("chat_template")
        if isinstance(source, list):  # several by name, in older folders
            named = {entry.get("name"): entry for entry in source if isinstance(entry, dict)}
            source = named.get("default", {}).get("template")
    if not isinstance(source, str):
        raise ChatError(
            f"{folder} has no chat template, so it cannot be told who says what; put the "
            f"{TEMPLATE_FILE} of its family into the folder, or give the model plain text"
        )
    try:
        return ChatTemplate(source, tokenizer, named_tokens(folder))
    except ChatError as error:
        raise ChatError(f"{folder}: {error}") from error


class _Inputs(NamedTuple):
    """What a template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    variables: dict[str, Any]


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ChatError("messages is not a list of at least one message")
    checked: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise ChatError(f"{where} is a {type(message).__name__}; expected role and content")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ChatError(f"{where}.role is {role!r}; expected a text such as 'user'")
        if "content" not in message and "tool_calls" not in message:
            raise ChatError(f"{where}.content is missing")
        content = _content(message.get("content"), f"{where}.content")
        checked.append({**message, "content": content})
    return checked


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ChatError(f"{where} is a {type(content).__name__}; expected a text or text parts")
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise ChatError(f"{where}[{number}] is {kind!r}; only parts of type 'text' are read")
        texts.append(text)
    return "".join(texts)


class _Marker:
    """Puts a mark into the names of control tokens that users wrote, so that they are none in what
    the template makes of them.

    Two texts that the template joins must not make a name either: one that ends as a name begins
    gets a mark behind it, one that begins as a name ends gets one before.
    """

    def __init__(self, mark: str, names: Sequence[str], pattern: re.Pattern[str]) -> None:
        self._mark, self._pattern = mark, pattern
        self._heads = tuple({name[:cut] for name in names for cut in range(1, len(name))})
        self._tails = tuple({name[cut:] for name in names for cut in range(1, len(name))})

    def inputs(self, asked: _Inputs) -> _Inputs:
        """The same with marks."""
        return asked._replace(
            messages=self._value(asked.messages),
            tools=self._value(asked.tools),
            variables={name: self._value(value) for name, value in asked.variables.items()},
        )

    def _value(self, value: Any, inside: bool = False) -> Any:
        """``value`` with marks in every text of it; ``inside``: within names alone, because the
        template compares this text.
        """
        if isinstance(value, str):
            return self._inside(value) if inside else self._text(value)
        if isinstance(value, Mapping):
            return {
                self._value(key, inside=True): self._value(item, inside=key in ("role", "type"))
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        core = text.strip()  # templates like to trim
        start = text.find(core)
        before = self._mark if core.startswith(self._tails) else ""
        behind = self._mark if core.endswith(self._heads) else ""
        after = text[start + len(core) :]
        return text[:start] + before + self._inside(core) + behind + after

    def _inside(self, text: str) -> str:
        return self._pattern.sub(lambda name: name[0][0] + self._mark + name[0][1:], text)


def _unused_mark(value: Any) -> str:
    used: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, str):
            used.update(value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                collect(key)
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    collect(value)
    mark = next((mark for mark in _MARKS if mark not in used), None)
    if mark is None:
        raise ChatError("the messages hold every code point that Unicode keeps for programs")
    return mark
