"""The models of a study: how each is trained, and what it is scored on.

    stages × poolings at the first size, the first pooling at the others:
        raw       T5 as it is
        nli       NLI triples
        cqa       questions and answers
        cqa_nli   NLI triples, from the weights of cqa
        equal     NLI triples, as many pairs at every size
    instructions, mean pooling at the first size:
        <symmetric | asymmetric | mixed>_<detailed | none>
        mixed_<tag | short | varied>

A stage whose file is not given is left out. Each model is a run of a sweep, and what
scores it is a command line of `sentence-t5 evaluate`.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import study_data
import sweep_plan

from sentence_t5 import gin_reader

RAW, NLI, CQA, CQA_NLI, EQUAL = "raw", "nli", "cqa", "cqa_nli", "equal"
INSTRUCTIONS = "instructions"
_MEAN = "mean"
_RUN = "gin/runs/nli.gin"
# What a size is trained with from random weights, where there is such a file.
_BUDGETS = "gin/study"
_RECIPES = {
    RAW: "gin/recipes/st5_raw.gin",
    NLI: "gin/recipes/st5_nli_only.gin",
    CQA: "gin/recipes/st5_stage1_cqa.gin",
    CQA_NLI: "gin/recipes/st5_stage2_nli.gin",
    EQUAL: "gin/recipes/st5_nli_only.gin",
}
_RECIPE = "gin/recipes/instructor.gin"
_KINDS = (study_data.SYMMETRIC, study_data.ASYMMETRIC, study_data.MIXED)


@dataclasses.dataclass(frozen=True)
class Model:
    """One model of the study.

    Attributes:
        run: its training.
        stage: one of the stages, or ``INSTRUCTIONS``.
        size: of T5.
        pooling: of the vectors.
        data: of instructions: symmetric, asymmetric or mixed.
        wording: of instructions: how those it was trained with are worded.
        num_pairs: pairs it has seen when it is done, those of an earlier stage too.
        scored_by: arguments of `sentence-t5 evaluate` after ``--model_dir``.
    """

    run: sweep_plan.Run
    stage: str
    size: str
    pooling: str
    data: str
    wording: str
    num_pairs: int
    scored_by: tuple[str, ...]


def plan(flags: argparse.Namespace, instructed: study_data.Files | None) -> list[Model]:
    """Plans the models, each after those it starts from.

    Args:
        flags: of ``study.parse``.
        instructed: the files of rows with instructions, or None.

    Raises:
        ConfigError: a name or value is wrong.
    """
    models = []
    for size in flags.sizes if flags.nli_file or flags.cqa_file else ():
        for pooling in flags.poolings if size == flags.sizes[0] else flags.poolings[:1]:
            models += _stages(flags, size, pooling)
    models += _equal(flags, [m for m in models if m.stage == NLI])
    if instructed is not None:
        models += _instructions(flags, instructed)
    return models


def _stages(flags: argparse.Namespace, size: str, pooling: str) -> list[Model]:
    """Plans one column of the study: a size and a pooling through all stages."""
    models = [_make(flags, RAW, size, pooling)]
    if flags.nli_file:
        models.append(_make(flags, NLI, size, pooling))
    if flags.cqa_file:
        models.append(_make(flags, CQA, size, pooling))
    if flags.nli_file and flags.cqa_file:
        models.append(_make(flags, CQA_NLI, size, pooling, after=models[-1]))
    return models


def _equal(flags: argparse.Namespace, models: Sequence[Model]) -> list[Model]:
    """Plans NLI with as many pairs at every size as the size that sees fewest."""
    models = [model for model in models if model.pooling == flags.poolings[0]]
    fewest = min((model.num_pairs for model in models), default=0)
    if all(model.num_pairs == fewest for model in models):
        return []
    return [
        _make(
            flags,
            EQUAL,
            model.size,
            model.pooling,
            num_steps=fewest // batch_size(model.run),
        )
        for model in models
        if model.num_pairs != fewest
    ]


def _make(
    flags: argparse.Namespace,
    stage: str,
    size: str,
    pooling: str,
    *,
    after: Model | None = None,
    num_steps: int | None = None,
) -> Model:
    """Plans one model of Sentence-T5's stages.

    Args:
        flags: the study's.
        stage: one of the stages.
        size: of T5.
        pooling: of the vectors.
        after: the first stage, of a second one.
        num_steps: instead of as many as flags and files say.
    """
    first = _first_weights(flags, pooling, size)
    if after is not None:
        first = [f"--initial_checkpoint_path={after.run.model_dir}"]
    steps = 0 if stage == RAW else num_steps
    more = [*first, *_data(flags, stage), *flags.more]
    more += [] if steps is None else [f"--gin.TRAIN_STEPS={steps}"]
    files = [_RUN, _RECIPES[stage], *_budget(flags, size)]
    run = _run(flags, stage, files, size, pooling, more)
    return Model(
        run=run,
        stage=stage,
        size=size,
        pooling=pooling,
        data="",
        wording="",
        num_pairs=_pairs(run) + (0 if after is None else after.num_pairs),
        scored_by=_sentence_scores(flags),
    )


def _data(flags: argparse.Namespace, stage: str) -> list[str]:
    """Returns the flags of a stage's training data."""
    if stage == RAW:
        return []
    if stage == CQA:
        left, right = flags.cqa_columns
        return [f"--train_file={flags.cqa_file}", f"--left={left}", f"--right={right}"]
    left, right, negative = flags.nli_columns
    return [
        *(f"--train_file={flags.nli_file}", f"--left={left}", f"--right={right}"),
        f"--negatives={negative}",
    ]


def _instructions(flags: argparse.Namespace, files: study_data.Files) -> list[Model]:
    """Plans INSTRUCTOR's ablations."""
    kinds = [kind for kind in _KINDS if files.tasks(kind)]
    if len(kinds) < len(_KINDS):
        kinds = [study_data.MIXED]  # All of one kind: there is nothing to tell apart.
    settings = [
        (kind, wording)
        for kind in kinds
        for wording in (study_data.NONE, study_data.DETAILED)
    ]
    settings += [
        (study_data.MIXED, wording)
        for wording in (study_data.TAG, study_data.SHORT, study_data.VARIED)
    ]
    # INSTRUCTOR's rate rises over a tenth of the steps, however many there are.
    steps = _instructed(
        flags, files, study_data.MIXED, study_data.NONE, 0
    ).run.total_steps
    return [
        _instructed(flags, files, kind, wording, steps // 10)
        for kind, wording in settings
    ]


def _instructed(
    flags: argparse.Namespace,
    files: study_data.Files,
    kind: str,
    wording: str,
    warmup_steps: int,
) -> Model:
    """Plans one model trained on rows with instructions."""
    size = flags.sizes[0]
    labelled = tuple(task for task in flags.labelled if task in files.train_rows)
    more = [
        *_first_weights(flags, _MEAN, size),
        f"--medi_file={files.train(wording)}",
        f"--gin.WARMUP_STEPS={warmup_steps}",
        f"--gin.medi.mixture.without_in_batch={labelled!r}",
        # INSTRUCTOR starts from GTR, which has a projection; T5 has none.
        "--allow_missing=projection/.*",
        # Paraphrases may be long: the text has its half.
        "--gin.train/engine.dataset.on_crowding='keep_text'",
    ]
    if kind != study_data.MIXED:
        more.append(f"--gin.medi.mixture.only={tuple(files.tasks(kind))!r}")
    folder = f"{INSTRUCTIONS}/{kind}_{wording}"
    budget = _budget(flags, f"{size}_instructions")
    run = _run(
        flags, folder, [_RUN, _RECIPE, *budget], size, _MEAN, [*more, *flags.more]
    )
    own = study_data.DETAILED if wording == study_data.VARIED else wording
    held_out = [files.held_out(own)]
    if kind == study_data.MIXED and wording in (study_data.DETAILED, study_data.VARIED):
        held_out += map(files.held_out, study_data.PARAPHRASED)
    scored = [task for task in flags.labelled if task in files.held_out_rows]
    return Model(
        run=run,
        stage=INSTRUCTIONS,
        size=size,
        pooling=_MEAN,
        data=kind,
        wording=wording,
        num_pairs=_pairs(run),
        scored_by=("--medi", *held_out, f"--labelled={','.join(scored)}"),
    )


def _sentence_scores(flags: argparse.Namespace) -> tuple[str, ...]:
    """Returns the arguments that score a model of Sentence-T5's stages."""
    words = ["--sts", *flags.sts, "--geometry", flags.sts[0]]
    words += ["--beir", *flags.beir] if flags.beir else []
    words += ["--transfer", *flags.transfer] if flags.transfer else []
    return (*words, f"--cache_dir={flags.out}/vectors")


def _first_weights(flags: argparse.Namespace, pooling: str, size: str) -> list[str]:
    """Returns the flags of the weights that a model starts from."""
    if flags.initial_checkpoint_path is None:
        return ["--gin.INITIAL_CHECKPOINT_PATH=None"]
    path = flags.initial_checkpoint_path.replace("{size}", size)
    # T5's decoder is of use to one pooling alone.
    ignore = [] if pooling == "encdec" else ["--ignore=decoder/.*"]
    return [f"--initial_checkpoint_path={path}", *ignore]


def _budget(flags: argparse.Namespace, name: str) -> list[str]:
    """Returns the file that says how long a size is trained from random weights."""
    if flags.initial_checkpoint_path is not None:
        return []
    file = f"{_BUDGETS}/{name}.gin"
    folders = gin_reader.search_paths(flags.gin_search_paths)
    is_there = any((pathlib.Path(folder) / file).is_file() for folder in folders)
    return [file] if is_there else []


def _run(
    flags: argparse.Namespace,
    folder: str,
    files: Sequence[str],
    size: str,
    pooling: str,
    more: Sequence[str],
) -> sweep_plan.Run:
    """Plans one training as a run of a sweep, in a folder named by the study."""
    (run,) = sweep_plan.plan(
        sizes=[size],
        poolings=[pooling],
        axes=[],
        gin_file=files,
        more=[*more],
        out=f"{flags.out}/{folder}",
    )
    return dataclasses.replace(
        run, name=f"{folder}/{run.name}", values={"stage": folder, **run.values}
    )


def batch_size(run: sweep_plan.Run) -> int:
    """Returns a run's pairs in a batch."""
    return int(run.settings["BATCH_SIZE"])


def _pairs(run: sweep_plan.Run) -> int:
    return run.total_steps * batch_size(run)
