"""The package: what a wheel holds, what an import costs, what is asked for."""

import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import sentence_t5
from sentence_t5 import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_gin_is_no_package():
    """With an __init__.py, `import gin` in the checkout would not find gin-config."""
    assert not list((ROOT / "gin").glob("**/*.py"))


@pytest.mark.entry
def test_wheel_holds_modules_tasks_gin_files_and_vocabulary(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("sentence_t5", "tasks", "gin", "tests"):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignore)
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    expected = {
        "sentence_t5/" + path.relative_to(ROOT / "sentence_t5").as_posix()
        for path in (ROOT / "sentence_t5").glob("**/*.py")
    }
    for folder, patterns in (
        ("tasks", ("*.py", "data/*.model")),
        ("gin", ("**/*.gin",)),
    ):
        for pattern in patterns:
            paths = list((ROOT / folder).glob(pattern))
            assert paths
            expected |= {f"sentence_t5/{p.relative_to(ROOT).as_posix()}" for p in paths}
    assert expected <= files
    assert {name.split("/")[0] for name in files} == {
        "sentence_t5",
        f"sentence_t5-{sentence_t5.__version__}.dist-info",
    }


@pytest.mark.entry
def test_imports_and_help_are_light():
    """`import sentence_t5`, encoding and --help never start TensorFlow."""
    code = """
import sys
import sentence_t5
from sentence_t5 import cli
assert cli.main(["--help"]) == 0
heavy = [name for name in ("jax", "numpy", "tensorflow", "gin") if name in sys.modules]
assert not heavy, heavy
import sentence_t5.tasks
assert sentence_t5.tasks.__file__.endswith("tasks/__init__.py")
sentence_t5.SentenceT5, sentence_t5.EncoderConfig
import sentence_t5.evaluate, sentence_t5.encode
assert "jax" in sys.modules
heavy = [name for name in ("tensorflow", "seqio") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "sentence-t5 <verb>" in done.stdout


def test_public_names():
    assert set(sentence_t5.__all__) <= set(dir(sentence_t5))
    for name in sentence_t5.__all__:
        assert getattr(sentence_t5, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'SentenceT6'"):
        sentence_t5.SentenceT6  # noqa: B018


def test_verbs_are_modules_with_a_main():
    for verb in cli.VERBS:
        path = ROOT / "sentence_t5" / cli.MODULES.get(verb, verb)
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = file.read_text()
        assert re.search(r"^def main\(argv", text, re.MULTILINE), verb


def test_unknown_verb(capsys):
    assert cli.main(["trian"]) == 2
    assert "there is no verb trian. Did you mean train?" in capsys.readouterr().err


def test_verb_gets_its_arguments_and_gives_its_exit_code(capsys):
    assert cli.main(["config"]) == 2
    assert "No gin file is given" in capsys.readouterr().err
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert sentence_t5.__version__ in capsys.readouterr().out


def _requirements() -> dict[str, list[Requirement]]:
    """Returns what setup.py asks for, by extra ("" for all)."""
    found = {}
    namespace = {
        "setup": lambda **kwargs: found.update(kwargs),
        "find_packages": lambda *args, **kwargs: [],
    }
    source = (ROOT / "setup.py").read_text().replace("import setuptools", "")
    stand_in = type(
        "setuptools", (), {k: staticmethod(v) for k, v in namespace.items()}
    )
    exec(compile(source, "setup.py", "exec"), {"setuptools": stand_in})
    named = {"": found["install_requires"], **found["extras_require"]}
    return {extra: [Requirement(r) for r in rs] for extra, rs in named.items()}


def test_tested_versions_meet_the_lower_bounds():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {pin.name.lower().replace("_", "-"): pin.specifier for pin in pins}
    assert len(versions) == len(pins)
    for specifier in versions.values():
        assert str(specifier).startswith("==")
    requirements = _requirements()
    for requirement in requirements[""] + requirements["test"]:
        pinned = versions[requirement.name.lower().replace("_", "-")]
        version = Version(str(pinned).removeprefix("=="))
        assert version in requirement.specifier, requirement


def test_python_bounds_and_version_agree():
    setup = (ROOT / "setup.py").read_text()
    assert 'python_requires=">=3.11"' in setup
    assert f'version="{sentence_t5.__version__}"' in setup
    assert "py311" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("script", ["launch/smoke.sh", "launch/test.sh", ".ci/run"])
def test_scripts_pass_shellcheck(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", "-x", script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
