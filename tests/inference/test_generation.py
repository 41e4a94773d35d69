"""Streams and stop strings of a model whose tokens are bytes; its EOS is 256."""

import random

from t5x.inference.generation import Generation, Piece, cut_at_stop, stream

ALPHABET = "abcé😀 \ufffd"  # some characters have several bytes, so a piece may end within one


def byte_generator(output: str):
    """Return the `generate` of a model that generates these characters, then EOS."""
    ids = [*output.encode(), 256]

    def generate(limit: int) -> Generation:
        text = bytes(i for i in ids[:limit] if i < 256).decode(errors="replace")
        return Generation(text, 0.0, ids[:limit])

    return generate


def test_pieces_join_to_the_output_before_the_first_stop_string():
    rng = random.Random(0)
    cut = streamed = 0
    for _ in range(10_000):
        generate = byte_generator("".join(rng.choices(ALPHABET, k=rng.randrange(40))))
        stop = ["".join(rng.choices("abcé\ufffd", k=rng.randrange(1, 4))) for _ in range(rng.randrange(3))]
        length = rng.randrange(1, 60)
        whole = generate(length)
        text, is_stopped = cut_at_stop(whole.text, stop)
        *pieces, last = stream(generate, length, [256], stop)
        assert "".join(piece.text for piece in [*pieces, last]) == text, (whole, stop, length)
        assert all(piece.text and piece.finish is piece.generation is None for piece in pieces)
        assert last.finish == ("stop" if is_stopped or 256 in whole.tokens else "length")
        assert last.generation.text.startswith(text)
        cut, streamed = cut + is_stopped, streamed + (len(pieces) > 0)
    assert cut > 1000 and streamed > 1000


def test_a_stream_computes_at_most_twice_the_tokens_and_none_after_the_end():
    limits = []

    def stream_of(output: str, length: int, *, eos_ids=(256,), stop=()) -> list[Piece]:
        generate = byte_generator(output)
        limits.clear()
        return list(stream(lambda limit: limits.append(limit) or generate(limit), length, eos_ids, stop))

    assert [piece.text for piece in stream_of("a" * 40, 20)] == ["a" * 8, "a" * 8, "a" * 4] and limits == [8, 16, 20]
    assert [piece.text for piece in stream_of("", 20)] == [""] and limits == [8]
    assert stream_of("abcdefgh", 100)[-1].finish == "stop" and limits == [8, 16]
    assert stream_of("a" * 10 + "b" + "a" * 50, 100, stop=["b"])[-1].finish == "stop" and limits == [8, 16]
    assert stream_of("a" * 7 + "b", 100, eos_ids=(3, ord("b")))[-1].finish == "stop" and limits == [8]
