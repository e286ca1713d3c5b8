"""Times PyTorch training steps on triplets, to compare ``packing.py`` with.

    python benchmarks/torch_train.py --train_file=triplets.tsv \
        --vocabulary=spiece.model [--columns=anchor,positive,hard_negative] \
        [--batch_size=128] [--max_length=64]

T5 1.0 small in float32, mean pooling, projection to 768, AdamW, as ``torch_step.py``;
each column of a batch is padded to its longest text and encoded in a call of its own,
as sentence-transformers does. Needs torch, transformers and sentencepiece.
"""

import argparse
import csv
import itertools

import measuring
import sentencepiece
import torch
import torch_step

_EOS = 1


def read_columns(path: str, columns: list[str], vocabulary: str, max_length: int):
    """Returns the token ids of each column's texts."""
    model = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
    with open(path, encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        [[*ids[: max_length - 1], _EOS] for ids in model.encode([r[c] for r in rows])]
        for c in columns
    ]


def pad(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads texts to the longest."""
    longest = max(map(len, texts))
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in texts])
    return tokens, (tokens != 0).long()


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--vocabulary", required=True)
    parser.add_argument("--columns", default="anchor,positive,hard_negative")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, projection, optimizer = torch_step.make_model()
    columns = read_columns(
        args.train_file, args.columns.split(","), args.vocabulary, args.max_length
    )
    order = torch.randperm(len(columns[0])).tolist()
    starts = itertools.count(step=args.batch_size)
    labels = torch.arange(args.batch_size)

    def embed(texts):
        tokens, mask = pad(texts)
        hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask[..., None].float()
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(projection(pooled), dim=-1)

    def run():
        start = next(starts)
        rows = order[start : start + args.batch_size]
        optimizer.zero_grad()
        left, right, negative = (embed([texts[i] for i in rows]) for texts in columns)
        logits = 100.0 * left @ torch.cat([right, negative]).T
        loss = torch.nn.functional.cross_entropy(logits, labels)
        backward = logits[:, : args.batch_size].T
        loss = loss + torch.nn.functional.cross_entropy(backward, labels)
        loss.backward()
        optimizer.step()
        loss.item()

    took = measuring.summary(measuring.seconds_of(run, warmup=1, times=args.steps))
    measuring.report(
        "torch_train",
        **took,
        pairs=args.batch_size,
        pairs_per_s=round(args.batch_size / took["median_s"], 1),
    )


if __name__ == "__main__":
    main()
