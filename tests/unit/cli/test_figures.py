"""Figures of an output in words and values."""

from dualflow.cli.figures import Figures, figures_line

WHOLE = Figures(
    prompt_tokens=40, cached_tokens=0, new_tokens=11, prefill_seconds=0.5, decode_seconds=2.0,
    cache_bytes=2048, cache_bytes_allocated=4096, aux_positions=11, drafted=0, accepted=0,
    backend="native",
)  # fmt: skip


def test_a_line_for_people():
    assert figures_line(WHOLE, "length") == (
        "40 prompt + 11 new tokens (length) | prefill 0.500 s, 80 tokens/s | decode 5.0 tokens/s | "
        "KV cache 2.0 KiB | auxiliary at 11 of 50 positions"
    )


def test_what_was_known_and_guessed_is_told_where_there_was_any():
    import dataclasses

    more = dataclasses.replace(WHOLE, cached_tokens=32, drafted=9, accepted=4)
    line = figures_line(more, "stop")
    assert "16 tokens/s, 32 of the prompt known" in line and "4 of 9 guesses held" in line
    assert "auxiliary ran 11 times" in line


def test_one_token_has_no_speed_of_decoding():
    import dataclasses

    one = dataclasses.replace(WHOLE, new_tokens=1, decode_seconds=0.0)
    assert one.decode_tokens_per_second is None
    assert "no decode steps" in figures_line(one, "length")
    assert one.record()["prefill_tokens_per_second"] == 80


def test_the_slower_backend_is_named():
    import dataclasses

    line = figures_line(dataclasses.replace(WHOLE, backend="torch"), "length")
    assert line == f"{figures_line(WHOLE, 'length')} | backend torch"
