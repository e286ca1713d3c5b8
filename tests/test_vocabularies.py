"""The vocabularies: T5's special ids and sentinels, and errors that come at once."""

import os
import pathlib
import time

import pytest
import seqio

from sentence_t5 import vocabularies

DATA = pathlib.Path(os.environ.get("SENTENCE_T5_TEST_DATA", ""))


def test_synthetic_golden_ids():
    vocabulary = vocabularies.synthetic()
    assert vocabulary.vocab_size == 1280 + 100
    assert vocabulary.tokenizer.pad_id() == 0
    assert (vocabulary.eos_id, vocabulary.unk_id, vocabulary.bos_id) == (1, 2, -1)
    ids = vocabulary.encode("Two kids opened a big box.")
    assert vocabulary.tokenizer.id_to_piece(ids) == [
        *("▁two", "▁kids", "▁opened", "▁a", "▁big", "▁box", ".")
    ]
    assert ids == [104, 986, 914, 6, 519, 712, 1232]
    assert vocabulary.encode("tWO KIDS opened a Big bOX.") == ids


def test_synthetic_spells_any_ascii_text():
    vocabulary = vocabularies.synthetic()
    text = "".join(chr(code) for code in range(32, 127))
    assert vocabulary.unk_id not in vocabulary.encode(text)
    assert vocabulary.unk_id in vocabulary.encode("é")


def test_sentinels_are_numbered_from_the_end():
    vocabulary = vocabularies.synthetic()
    assert vocabulary.encode("<extra_id_0>") == [1379]
    assert vocabulary.encode("<extra_id_99>") == [1280]
    assert vocabularies.synthetic(extra_ids=0).vocab_size == 1280


def test_missing_file_says_at_once_what_to_set(tmp_path):
    path = tmp_path / "absent.model"
    start = time.monotonic()
    with pytest.raises(FileNotFoundError, match="VOCABULARY_PATH") as error:
        vocabularies.sentencepiece(str(path))
    assert time.monotonic() - start < 5
    assert str(path) in str(error.value)


def test_file_that_is_no_model(tmp_path):
    path = tmp_path / "text.model"
    path.write_text("not a model")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        vocabularies.sentencepiece(str(path))


@pytest.mark.parametrize("path", ["", None])
def test_path_that_is_no_path(path):
    with pytest.raises(ValueError, match="must be a string"):
        vocabularies.sentencepiece(path)


def test_sha256_tells_sentinels_and_kinds_apart():
    hashes = {
        vocabularies.sha256(vocabularies.synthetic()),
        vocabularies.sha256(vocabularies.synthetic(extra_ids=0)),
        vocabularies.sha256(seqio.ByteVocabulary()),
        vocabularies.sha256(seqio.ByteVocabulary(extra_ids=3)),
    }
    assert len(hashes) == 4
    assert vocabularies.sha256(vocabularies.synthetic()) in hashes


@pytest.mark.skipif(
    not (DATA / "vocab/spiece.model").is_file(),
    reason="SENTENCE_T5_TEST_DATA names no folder with T5's vocab/spiece.model",
)
def test_t5_vocabulary_golden_ids():
    vocabulary = vocabularies.sentencepiece(str(DATA / "vocab/spiece.model"))
    assert vocabulary.vocab_size == 32_100
    assert vocabulary.encode("Hello world.") == [8774, 296, 5]
    assert vocabulary.encode("<extra_id_0>") == [32_099]
