"""One output's text as its tokens arrive, and the stop strings in it. No torch."""

from collections.abc import Sequence

from dualflow.data.detokenize import StopStrings, StreamDetokenizer, TokenTexts


class TextStream:
    """Turns one output's tokens into text pieces that nothing later can change.

    texts:       the tokenizer's; None: there is no tokenizer, and no text.
    stop:        stop strings: the text ends before the first one completed.
    prompt_ids:  what the text continues.
    min_tokens:  the text of so many tokens takes no part in stop strings.
    """

    def __init__(
        self,
        texts: TokenTexts | None,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decoder = None if texts is None else StreamDetokenizer(texts, (), prompt_ids)
        self._stops = StopStrings(stop)
        self._min_tokens = min_tokens
        self._count = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None as long as there is none."""
        return self._stops.found

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` makes certain; often ""."""
        self._count += 1
        if self._decoder is None:
            return ""
        text = self._decoder.push(token_id)
        return text if self._count <= self._min_tokens else self._stops.push(text)

    def finish(self) -> str:
        """What was held back: half a character (as U+FFFD), the start of a stop string."""
        if self._decoder is None:
            return ""
        text = self._decoder.finish()
        if self._count <= self._min_tokens:
            return text
        return self._stops.push(text) + self._stops.finish()
