"""The words of the project: mesh axes, logical axes, batch keys, special ids.

Every other module takes these names from here, so that a batch key or an axis is
spelt in one place. Letters used in shapes: ``B`` pairs in the global batch, ``L``
tokens, ``D`` model width, ``E`` embedding width, ``H`` heads, ``K`` head width, ``F``
MLP width, ``V`` vocabulary, ``N`` negatives per pair, ``C`` candidates
(``B * (1 + N)``), ``R`` relative-position buckets.
"""

# Mesh axes. The batch lies over DATA and FSDP, parameters over FSDP and MODEL.
DATA = "data"
FSDP = "fsdp"
MODEL = "model"
MESH_AXES = (DATA, FSDP, MODEL)

# Logical axes of parameters.
VOCAB = "vocab"
EMBED = "embed"
MLP = "mlp"
HEADS = "heads"
RELPOS_BUCKETS = "relpos_buckets"
AFFINITY = "affinity"
LAYERS = "layers"

# Logical axes of activations.
ACT_BATCH = "act_batch"
ACT_LENGTH = "act_length"
ACT_EMBED = "act_embed"
ACT_HEADS = "act_heads"
ACT_MLP = "act_mlp"

# Batch keys, with their shapes.
LEFT_TOKENS = "left_tokens"  # int32 [B L]
RIGHT_TOKENS = "right_tokens"  # int32 [B L]
NEGATIVE_TOKENS = "negative_tokens"  # int32 [B N L]
NEGATIVE_MASK = "negative_mask"  # bool [B N], False on padding
ROW_MASK = "row_mask"  # bool [B], False on padding rows (evaluation only)
SCORES = "scores"  # float32 [B], similarity judgements (evaluation only)
# How many of a row's first tokens are its instruction's; absent without instructions.
LEFT_INSTRUCTION_LENGTHS = "left_instruction_lengths"  # int32 [B]
RIGHT_INSTRUCTION_LENGTHS = "right_instruction_lengths"  # int32 [B]
NEGATIVE_INSTRUCTION_LENGTHS = "negative_instruction_lengths"  # int32 [B N]
# False where other rows are no negatives; absent where they are for all rows.
IN_BATCH = "in_batch"  # bool [B]
# A guide's unit vectors of the same texts; absent without a guide.
LEFT_GUIDE = "left_guide"  # float32 [B G]
RIGHT_GUIDE = "right_guide"  # float32 [B G]
NEGATIVE_GUIDE = "negative_guide"  # float32 [B N G]

# Instead of the tokens and lengths above: all texts packed into R rows of P tokens. The
# W devices that share the batch have B/W pairs and R/W rows each.
PACKED_TOKENS = "packed_tokens"  # int32 [R P]
PACKED_SLOTS = "packed_slots"  # int32 [R P], which of its row's texts; -1 is padding
PACKED_NUMBERS = "packed_numbers"  # int32 [R S], the number of each slot's text
PACKED_INSTRUCTION_LENGTHS = "packed_instruction_lengths"  # int32 [R S]
# Of each pair's texts (left, right, negatives): its slot among those of the device's
# rows; -1 for padding negatives.
PACKED_PLACES = "packed_places"  # int32 [W B/W 2+N]

# Features of a SeqIO task.
INPUTS = "inputs"
TARGETS = "targets"
NEGATIVE_TARGETS = "negative_targets"
# Behind a text feature's name: of a source's rows, the instruction before the text; of
# a task's examples, how many of the feature's first ids are the instruction's.
INSTRUCTION = "_instruction"
INSTRUCTION_LENGTH = "_instruction_length"

# Ids fixed by every T5 vocabulary.
PAD_ID = 0
EOS_ID = 1
