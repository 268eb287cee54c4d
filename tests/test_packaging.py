"""What is shipped: the sdist has all that a build, the tests and the documents need, and nothing built; and what is said
where the pieces of an installation do not fit."""
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "csrc", "docs", "engram", "examples", "tests", "tools")
FILES = ("CHANGELOG.md", "CMakeLists.txt", "CONTRIBUTING.md", "MANIFEST.in", "README.md", "mkdocs.yml", "pyproject.toml",
         "setup.py")
BUILT = (".pyc", ".so", ".pyd")


def sources(folder: Path) -> set[str]:
    """Paths of all files that are no build products, relative to the folder."""
    inside = (path for name in FOLDERS for path in (folder / name).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in inside if path.suffix not in BUILT} | set(FILES)


@pytest.mark.slow
def test_the_sdist_has_all_sources(tmp_path):
    tree = tmp_path / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    (tree / "engram" / "_C.built.so").write_bytes(b"")  # as it lies there after a build in place
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--formats=tar", "--dist-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar")
    with tarfile.open(archive) as content:
        names = {member.name.partition("/")[2] for member in content if member.isfile()}
    assert sources(tree) - names == set()
    assert not [name for name in names if name.endswith(BUILT)]
    assert {"engram/py.typed", "engram/_C.pyi", "csrc/bindings/library.cpp", "csrc/kernels/scalar.h"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["decode", "gate"])     # an op without a gradient, and one with
def test_a_build_older_than_the_python_files(missing):
    """One sentence that says what to do, not torch's about an operator."""
    program = f"""
import torch

register = torch.library.register_fake

def without_it(name):
    if name == "engram::{missing}":
        raise RuntimeError(f"operator {{name}} does not exist")
    return register(name)

torch.library.register_fake = without_it
import engram
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"^ImportError: engram's compiled part \(.*\) is older than its Python files: run ", done.stderr,
                     re.MULTILINE), done.stderr
