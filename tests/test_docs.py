"""The Python in README and docs/ runs: one namespace per document, blocks in order.

A block that imports one of OPTIONAL which is not installed ends its document there, as skipped.
"""
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import engram
import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in path.read_text()]

OPTIONAL = ("transformers", "accelerate", "peft", "lightning")


@pytest.fixture
def environment():
    """What a recipe sets, as torchrun would, ends with it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_runs(path, environment):
    torch.manual_seed(0)
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        for name in re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE):
            if name in OPTIONAL and importlib.util.find_spec(name) is None:
                pytest.skip(f"{path.name} from here on needs {name}")
        exec(compile(block, str(path), "exec"), namespace)


def test_there_is_code():
    assert {"README.md", "training.md", "decoding.md"} <= {path.name for path in DOCUMENTS}


def test_every_op_is_in_the_reference():
    page = (ROOT / "docs/api/ops.md").read_text()
    names = [name for name, op in vars(engram.ops).items() if inspect.isfunction(op)]
    assert names and not [name for name in names if f"::: engram.ops.{name}.{name}" not in page]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (extra: docs)")
def test_the_site_builds(tmp_path):
    """No broken link, no page left out, no name in the API reference that there is none of."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "multiplier" in (tmp_path / "site/api/ops/index.html").read_text()  # docstrings are there, not just names
