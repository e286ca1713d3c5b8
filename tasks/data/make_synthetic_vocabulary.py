"""Trains `synthetic.model`, the vocabulary of the synthetic task, from its grammar.

Run by hand when the lexicon changes, and commit the result:

    python tasks/data/make_synthetic_vocabulary.py

Training is deterministic. Capitals are folded (one small normalisation rule each), and
every printable ASCII character is a piece, so that any English text can be encoded.
"""

import io
import pathlib
import string
import tempfile

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from sentence_t5.tasks import synthetic

NUM_PIECES = 1280
_MODEL = pathlib.Path(__file__).parent / "synthetic.model"


def main() -> None:
    """Trains the model and writes it beside this file."""
    rows = synthetic.triples(20_000, seed=0)
    texts = (text for row in rows for text in (row["inputs"], row["targets"]))
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="ascii") as rules:
        for upper, lower in zip(
            string.ascii_uppercase, string.ascii_lowercase, strict=True
        ):
            rules.write(f"{ord(upper):X}\t{ord(lower):X}\n")
        rules.flush()
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts,
            model_writer=model,
            model_type="bpe",
            vocab_size=NUM_PIECES,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            character_coverage=1.0,
            required_chars=string.ascii_lowercase + string.digits + string.punctuation,
            normalization_rule_tsv=rules.name,
            num_threads=1,
            minloglevel=1,
        )
    # The temporary file's name is recorded in the model: it is not the same twice.
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    proto.trainer_spec.ClearField("input")
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    _MODEL.write_bytes(proto.SerializeToString(deterministic=True))
    print(f"{_MODEL}: {len(proto.pieces)} pieces, {_MODEL.stat().st_size} bytes")


if __name__ == "__main__":
    main()
