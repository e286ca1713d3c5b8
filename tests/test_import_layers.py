"""Imports go up the list of layers only, and never in a circle."""

import ast
import graphlib
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent

# See docs/architecture.md. What is not listed is of the third layer: the world.
LAYERS = {
    0: ["", "names"],
    1: [  # Pure maths.
        *["t5", "pooling", "encoder", "candidate_masks", "losses", "metrics"],
        "text_groups",
    ],
    2: [  # Where it runs.
        *["partitioning", "optim", "cached_gradients", "steps", "search"],
    ],
    4: [  # Verbs, and what they are made of.
        *[
            "train",
            "training_loop",
            "evaluate",
            "encode",
            "mine",
            "config",
            "compile",
            "cli",
        ],
        *["embedding_cache", "fit_cache", "retrieve", "evaluate_retrieval"],
        *["evaluate_sts", "evaluate_geometry", "evaluate_transfer"],
        *["evaluate_instructions", "evaluate_inputs", "truncation"],
        *["mining", "mining_files", "average"],
        *[
            "compile_report",
            "compile_setup",
            "compile_tasks",
            "distributed",
            "engine",
            "t5x_engine",
            "gin_checks",
            "gin_explain",
            "gin_files",
            "gin_flags",
            "gin_reader",
        ],
        *["inference", "evals", "export", "import_weights", "inspect_weights"],
    ],
}
LAYER = {name: layer for layer, names in LAYERS.items() for name in names}
# What the maths and encoding texts must stay free of.
TENSORFLOW = ("seqio", "tensorflow", "tensorflow_datasets", "tensorflow_text")


def modules() -> dict[str, pathlib.Path]:
    """Returns module name -> file, of the package and of its tasks."""
    found = {}
    for folder, prefix in (
        (ROOT / "sentence_t5", "sentence_t5"),
        (ROOT / "tasks", "sentence_t5.tasks"),
    ):
        for path in folder.glob("**/*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if "data" in parts:  # Generators of data files; nothing imports them.
                continue
            name = ".".join([prefix, *parts]).removesuffix(".__init__")
            found[name] = path
    return found


MODULES = modules()


def imports(path: pathlib.Path, *, inside_functions: bool) -> set[str]:
    """Returns the full names a module imports."""
    tree = ast.parse(path.read_text())
    skipped = set()
    if not inside_functions:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                skipped |= set(ast.walk(node))
    names = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from package import module` and `from module import name`.
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = {name for name in full if name in MODULES}
            names |= ours or {node.module}
    return names


def layer_of(module: str) -> int:
    return LAYER.get(module.removeprefix("sentence_t5").lstrip(".").split(".")[0], 3)


def test_every_listed_module_exists():
    here = {module.removeprefix("sentence_t5.").split(".")[0] for module in MODULES}
    assert {name for name in LAYER if name} <= here
    assert len(MODULES) > 15


def test_imports_only_go_down_the_layers():
    wrong = []
    for module, path in MODULES.items():
        for name in imports(path, inside_functions=True):
            if name in MODULES and layer_of(name) > layer_of(module):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_no_circular_imports():
    graph = {
        module: {
            name
            for name in imports(path, inside_functions=False)
            if name in MODULES and name != module
        }
        for module, path in MODULES.items()
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("sentence_t5.names") < order.index("sentence_t5.encoder")


def test_maths_and_inference_never_import_tensorflow():
    start = [module for module in MODULES if layer_of(module) <= 1]
    start += [
        f"sentence_t5.{name}"
        for name in ("inference", "evaluate", "encode", "mine", "cli")
    ]
    for root in start:
        assert not _reached(root, TENSORFLOW)
    assert _reached("sentence_t5.datasets", TENSORFLOW)


def test_progress_bars_are_made_in_one_module():
    using = {
        module
        for module, path in MODULES.items()
        if any(n.split(".")[0] == "tqdm" for n in imports(path, inside_functions=True))
    }
    assert using == {"sentence_t5.progress"}


def _reached(root: str, packages: tuple[str, ...]) -> set[str]:
    """Returns which of the packages importing a module would import, and where."""
    todo, seen, found = [root], set(), set()
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for name in imports(MODULES[module], inside_functions=False):
            if name in MODULES:
                todo.append(name)
            elif name.split(".")[0] in packages:
                found.add(f"{module} imports {name}")
    return found
