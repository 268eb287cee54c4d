"""The Python in README and docs/ runs: one namespace per document, blocks in order."""
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in path.read_text()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_runs(path):
    torch.manual_seed(0)
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        exec(compile(block, str(path), "exec"), namespace)


def test_there_is_code():
    assert {"README.md", "training.md", "decoding.md"} <= {path.name for path in DOCUMENTS}
