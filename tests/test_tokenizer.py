"""Token ids: equal to SeqIO's, closed by EOS, without TensorFlow."""

import os
import pathlib
import random
import socket
import subprocess
import sys
import unicodedata

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from sentence_t5 import tokenizer
from sentence_t5.tokenizer import Tokenizer

MODEL = pathlib.Path(__file__).parent.parent / "tasks" / "data" / "synthetic.model"
# The public T5 vocabulary, which is not ours to ship: a folder with vocab/spiece.model.
T5_MODEL = (
    pathlib.Path(os.environ.get("SENTENCE_T5_TEST_DATA", "")) / "vocab/spiece.model"
)

AWKWARD = [
    "",
    " ",
    "   two  spaces   ",
    "A small dog runs.",
    "tab\tand\nnewline\r\n",
    "no\u00a0break\u3000ideographic\u2009thin",
    "\u0000 null, \u0007 bell, \u0085 next line, \ufeff mark",
    "▁meta▁symbol ▁",
    "e\u0301 \u00e9 a\u0300\u0301\u0302 ﬁ ﬂ ﾃｽﾄ Ⅳ ½ ㎏",
    "👩‍👩‍👧 🏳️‍🌈 \U0001f9d1\U0001f3fd",
    "你好，世界。 こんにちは 안녕하세요",
    "שלום عليكم नमस्ते",
    "https://example.org/a?b=c&d=%20#e 3.14159 1,000,000",
    "</s> <pad> <unk> <s> s </s>",
    "<extra_id_0>",
    " <extra_id_0>",
    "<extra_id_0> and <extra_id_99>",
    "a<extra_id_0>b",
    "<extra_id_0>.",
    "<extra_id_1><extra_id_2>",
    "text <extra_id_12>",
    "<extra_id_100> <extra_id_-1> <EXTRA_ID_0>",
    "ab" * 3000,
    "word " * 2000,
]


def random_texts(n):
    rng = random.Random(0)
    ranges = [(32, 127), (160, 592), (880, 1280), (0x4E00, 0x4F00), (0x300, 0x340)]
    texts = []
    for _ in range(n):
        low, high = rng.choice(ranges)
        texts.append("".join(chr(rng.randrange(low, high)) for _ in range(30)))
    return texts


def models():
    if not T5_MODEL.exists():
        return [MODEL]
    return [MODEL, T5_MODEL]


@pytest.mark.parametrize("model", models(), ids=lambda p: p.name)
@pytest.mark.parametrize("extra_ids", [0, 100])
def test_ids_equal_the_vocabulary_that_seqio_builds(model, extra_ids):
    # What seqio.SentencePieceVocabulary does, less its import of TensorFlow.
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.read_bytes())
    for i in reversed(range(extra_ids)):
        proto.pieces.add(
            piece=f"▁<extra_id_{i}>",
            score=0.0,
            type=sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED,
        )
    reference = sentencepiece.SentencePieceProcessor()
    reference.LoadFromSerializedProto(proto.SerializeToString())
    ours = Tokenizer(model, extra_ids)
    assert ours.vocab_size == reference.GetPieceSize()
    texts = AWKWARD + random_texts(2000)
    expected = [[*reference.EncodeAsIds(text), 1] for text in texts]
    assert ours.encode(texts) == expected
    assert max(map(max, expected)) < ours.vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("model", models(), ids=lambda p: p.name)
def test_ids_equal_seqio(model):
    import seqio

    vocabulary = seqio.SentencePieceVocabulary(str(model), extra_ids=100)
    ours = Tokenizer(model)
    texts = AWKWARD + random_texts(2000)
    assert ours.encode(texts) == [[*vocabulary.encode(text), 1] for text in texts]
    assert ours.vocab_size == vocabulary.vocab_size


def test_sentinels_are_numbered_from_the_end():
    ours = Tokenizer(MODEL)
    assert ours.encode(["<extra_id_0>"])[0][-2:] == [ours.vocab_size - 1, 1]
    assert ours.encode(["<extra_id_99>"])[0][-2:] == [ours.vocab_size - 100, 1]
    assert ours.vocab_size == Tokenizer(MODEL, 0).vocab_size + 100


@pytest.mark.skipif(
    not T5_MODEL.exists(), reason="SENTENCE_T5_TEST_DATA names no T5 vocabulary"
)
def test_golden_ids_of_the_t5_vocabulary():
    ours = Tokenizer(T5_MODEL)
    assert ours.vocab_size == 32100
    assert ours.sha256.startswith("d60acb12")
    assert ours.encode(["Hello world.", "", "<extra_id_0>", "</s>"]) == [
        [8774, 296, 5, 1],
        [1],
        [32099, 1],
        [3, 2, 87, 7, 3155, 1],
    ]


def test_long_texts_are_trimmed_before_eos():
    ours = Tokenizer(MODEL)
    long = "a small dog runs " * 200
    full = ours.encode([long, "a dog"])
    assert tokenizer.trim(full[0], 16) == [*full[0][:15], 1]
    assert tokenizer.trim(full[1], 16) == full[1]
    # A text that fits exactly is left alone.
    assert tokenizer.trim(full[1], len(full[1])) == full[1]
    assert tokenizer.trim(full[0], 1) == [1]
    with pytest.raises(ValueError, match="max_length: got 0"):
        tokenizer.trim([5, 1], 0)


def test_decode_stops_at_eos():
    ours = Tokenizer(MODEL)
    ids = ours.encode(["a small dog"])[0]
    assert ours.decode(ids) == "a small dog"
    assert ours.decode([*ids, 0, 0]) == "a small dog"


def test_bytes_and_path_give_the_same_vocabulary():
    from_path, from_bytes = Tokenizer(MODEL), Tokenizer(MODEL.read_bytes())
    assert from_path.describe() == from_bytes.describe()
    assert from_path.encode(AWKWARD) == from_bytes.encode(AWKWARD)


def test_wrong_vocabularies(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"No vocabulary at .*gone.model"):
        Tokenizer(tmp_path / "gone.model")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        Tokenizer(tmp_path)
    (tmp_path / "text.model").write_text("not a model")
    with pytest.raises(ValueError, match=r"text.model is not a SentencePiece model"):
        Tokenizer(tmp_path / "text.model")
    proto = sentencepiece_model_pb2.ModelProto.FromString(MODEL.read_bytes())
    pad, eos = proto.pieces[0].piece, proto.pieces[1].piece
    proto.pieces[0].piece, proto.pieces[1].piece = eos, pad
    with pytest.raises(ValueError, match=r"pad id 1 and EOS id 0; T5 needs 0 and 1"):
        Tokenizer(proto.SerializeToString())


def test_the_first_id_that_differs_is_found():
    ours = Tokenizer(MODEL)
    assert ours.first_difference(Tokenizer(MODEL, extra_ids=7)) is None
    proto = sentencepiece_model_pb2.ModelProto.FromString(MODEL.read_bytes())
    last = proto.pieces.pop().piece
    number = len(proto.pieces)
    shorter = Tokenizer(proto.SerializeToString())
    assert ours.first_difference(shorter) == (number, last, "")
    proto.pieces[50].piece = "another"
    piece = Tokenizer(proto.SerializeToString()).first_difference(ours)
    assert piece[:2] == (50, "another")


def test_a_bucket_out_of_reach_is_an_error_at_once(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FileNotFoundError, match=r"gs://b/v.model can't be reached"):
        Tokenizer("gs://b/v.model")


def test_a_lone_surrogate_is_named():
    with pytest.raises(ValueError, match=r"texts\[1\] .*'\\ud800' at position 2"):
        Tokenizer(MODEL).encode(["fine", "a \ud800"])


def test_random_texts_cover_what_they_should():
    assert any(unicodedata.combining(c) for t in random_texts(50) for c in t)


@pytest.mark.entry
def test_needs_neither_tensorflow_nor_jax():
    code = (
        "import sys; from sentence_t5.tokenizer import Tokenizer; "
        f"print(Tokenizer({str(MODEL)!r}).encode(['a dog'])); "
        "print(sorted({'tensorflow', 'jax'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.splitlines()[-1] == "[]"
