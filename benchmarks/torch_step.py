"""Times a PyTorch step to compare ``step_time.py`` with: T5EncoderModel, AdamW.

    python benchmarks/torch_step.py [--batch_size=32] [--max_length=32] [--steps=10]

T5 1.0 small in float32, mean pooling, projection to 768, both sides of a batch in one
call, softmax over the batch in both directions. Needs torch and transformers.
"""

import argparse

import measuring
import torch
import transformers


def make_model():
    """Returns T5 1.0 small, a projection to 768, and AdamW for both."""
    config = transformers.T5Config(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8,
        dropout_rate=0.0,
    )  # fmt: skip
    model = transformers.T5EncoderModel(config)
    projection = torch.nn.Linear(512, 768, bias=False)
    parameters = [*model.parameters(), *projection.parameters()]
    return model, projection, torch.optim.AdamW(parameters, lr=1e-3)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, projection, optimizer = make_model()
    tokens = torch.randint(2, 32100, (2 * args.batch_size, args.max_length))
    mask = torch.ones_like(tokens)
    labels = torch.arange(args.batch_size)

    def run():
        optimizer.zero_grad()
        hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        pooled = hidden.mean(dim=1)
        unit = torch.nn.functional.normalize(projection(pooled), dim=-1)
        logits = 100.0 * unit[: args.batch_size] @ unit[args.batch_size :].T
        loss = torch.nn.functional.cross_entropy(logits, labels)
        loss += torch.nn.functional.cross_entropy(logits.T, labels)
        loss.backward()
        optimizer.step()
        loss.item()

    took = measuring.summary(measuring.seconds_of(run, warmup=2, times=args.steps))
    measuring.report("torch_step", **took, pairs=args.batch_size)


if __name__ == "__main__":
    main()
