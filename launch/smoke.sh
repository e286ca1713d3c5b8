#!/usr/bin/env bash
# From a fresh clone to embeddings: installs, trains the tiny model on the synthetic task,
# scores it before and after, and compares three sentences. A few minutes on two cores.
#
#   bash launch/smoke.sh [folder for the model; a temporary one by default]
set -euo pipefail

# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
make_venv ""
export PATH="$VENV/bin:$PATH"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}" TF_CPP_MIN_LOG_LEVEL=3

OUT="${1:-$(mktemp -d)}"
mkdir -p "$OUT"
MODEL="$OUT/model"

echo
echo "== Training st5_tiny_mean into $MODEL"
# The long save period keeps the first checkpoint (step 0) beside the last.
sentence-t5 train --gin_file="$ROOT/gin/st5_tiny_mean.gin" --model_dir="$MODEL" \
  --save_period=1000000

echo
echo "== Scoring it on held-out pairs, before training and after"
python - "$OUT/sts.tsv" <<'PYTHON'
import sys

from sentence_t5.tasks import synthetic

with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.write("sentence1\tsentence2\tscore\n")
    for row in synthetic.scored_pairs(1000, seed=1):
        file.write(f"{row['inputs']}\t{row['targets']}\t{row['scores']}\n")
PYTHON
sentence-t5 evaluate --model_dir="$MODEL" --step=0 --json="$OUT/before.json" \
  --sts="$OUT/sts.tsv"
sentence-t5 evaluate --model_dir="$MODEL" --json="$OUT/after.json" --sts="$OUT/sts.tsv"

echo
echo "== Cosines of three sentences"
printf '%s\n' \
  'Two young kids opened a big box in the park at noon.' \
  'At midday, a large carton was unsealed by two juvenile people.' \
  'Two young kids closed a big box in the park at noon.' >"$OUT/sentences.txt"
sentence-t5 encode --model_dir="$MODEL" --input="$OUT/sentences.txt" \
  --output="$OUT/sentences.npy"
python - "$OUT" <<'PYTHON'
import json
import pathlib
import sys

import numpy as np

out = pathlib.Path(sys.argv[1])
sentences = (out / "sentences.txt").read_text().splitlines()
vectors = np.load(out / "sentences.npy")
for i, j in [(0, 1), (0, 2), (1, 2)]:
    print(f"{vectors[i] @ vectors[j]:6.3f}  {sentences[i]}\n        {sentences[j]}")
before, after = (
    json.loads((out / name).read_text())["average"]["spearman"]
    for name in ("before.json", "after.json")
)
print(f"\nSpearman {before:.1f} before training, {after:.1f} after.")
if after < before + 25:
    sys.exit("That is less than 25 points more: something is wrong.")
PYTHON
