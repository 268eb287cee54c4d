"""The Python in README and docs/ runs: one namespace per document, blocks in order.

A block that imports one of OPTIONAL which is not installed ends its document there, as skipped.
"""
import importlib.util
import inspect
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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_runs(path):
    torch.manual_seed(0)
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        for name in re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE):
            if name in OPTIONAL and importlib.util.find_spec(name) is None:
                pytest.skip(f"{path.name} from here on needs {name}")
        exec(compile(block, str(path), "exec"), namespace)


def test_there_is_code():
    expected = {"README.md", "training.md", "decoding.md", "huggingface.md", "recipes.md"}
    assert expected <= {path.name for path in DOCUMENTS}
import inspect
