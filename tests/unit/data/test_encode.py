"""Documents to ids: what stands before a text, and what ends it."""

import pytest
import tokenizers
from tokenizers import AddedToken, processors

from dualflow.data.documents import Document, Segment
from dualflow.data.encode import encode_documents
from dualflow.data.split import Split
from dualflow.data.tokenizers import Tokenizer, bytes_tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Bytes, with a token before every text."""
    backend = tokenizers.Tokenizer.from_str(bytes_tokenizer().to_json())
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return Tokenizer(backend)


def encoded(tokenizer: Tokenizer, *segments: Segment) -> list[int]:
    documents: list[tuple[Document, Split]] = [(Document(segments), "train")]
    ((_, document),) = encode_documents(tokenizer, iter(documents))
    if document.counted is not None:
        assert len(document.counted) == len(document.ids)
    return document.ids.tolist()


def test_a_text_begins_with_what_its_tokenizer_puts_there(tokenizer: Tokenizer) -> None:
    start, end = tokenizer.id_of("<s>"), tokenizer.eos_id
    assert encoded(tokenizer, Segment("ab")) == [start, 97, 98, end]
    assert encoded(bytes_tokenizer(), Segment("ab")) == [97, 98, bytes_tokenizer().eos_id]


def test_a_chat_begins_with_its_own_control_tokens(tokenizer: Tokenizer) -> None:
    control = Segment("<|im_start|>", control=True, counted=False)
    ids = encoded(tokenizer, control, Segment("ab"))
    assert ids == [tokenizer.id_of("<|im_start|>"), 97, 98, tokenizer.eos_id]
