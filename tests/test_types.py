"""The type hints: the package holds under mypy --strict, and a user's program gets types from it that are of use."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engram

pytest.importorskip("mypy")
pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[1]  # whose pyproject.toml says how to run mypy
ROOT = Path(engram.__file__).parents[1]

PROGRAM = '''
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import assert_type

import engram
from engram import EngramConfig, TokenMap, nn, ops
from engram.models import LanguageModel, LanguageModelConfig, generate
from engram.quantize import quantize_table
from engram.state import EngramState

config = EngramConfig(hidden_size=32, vocab_size=100, table_size=(50, 60), layer_ids=(0, 2), table_dtype=torch.float32)
assert_type(config.memory_width, int)
assert_type(EngramConfig.from_dict(config.to_dict()), EngramConfig)
assert_type(EngramConfig.preset("demo").describe().total.rows, int)

token_map = TokenMap.identity(100)
assert_type(TokenMap.from_tokenizer("tokenizer.json", progress=True), TokenMap)
assert_type(token_map.fingerprint, str)
token_map.save(Path("map.npz"))

layer = nn.Engram(config, 0, token_map=token_map, device="cpu", dtype=torch.bfloat16)
assert_type(layer.hash, nn.NgramHash)
assert_type(layer.hash.multipliers, Tensor)
assert_type(layer.forward(torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64)), Tensor)
state = layer.init_state(batch_size=2, max_rollback=3)
assert_type(state, EngramState)
assert_type(state.position, Tensor)
assert_type(state.to("cpu").clone(), EngramState)
state.rollback(torch.tensor([1, 2]))

constants = layer.hash.multipliers, layer.hash.moduli, layer.hash.offsets
rows = ops.ngram_hash(torch.zeros(1, 4, dtype=torch.int64), *constants, pad_id=0)
plan = ops.row_plan(rows[0], 110)
assert_type(plan, ops.RowPlan)
assert_type(plan.count, Tensor)
table = torch.zeros(110, 8, requires_grad=True)
assert_type(ops.embedding(table, rows[0], sparse_grad=True, plan=plan), Tensor)
assert_type(ops.row_sum(torch.zeros(4, 8), *plan), tuple[Tensor, Tensor])
assert_type(engram.reference.embedding(table, rows[0]), Tensor)
assert_type(quantize_table(table, "int8", progress=lambda done, total: print(done, total)), tuple[Tensor, Tensor])

optimizer = engram.optim.RowWiseAdam(engram.optim.param_groups(layer, lr=1e-3, weight_decay=0.1), betas=(0.9, 0.95))
assert_type(optimizer, engram.optim.RowWiseAdam)
assert_type(engram.optim.clip_grad_norm_(layer.parameters(), 1.0), Tensor)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

model = LanguageModel(LanguageModelConfig(vocab_size=100, hidden_size=32, engram=config), token_map)
assert_type(generate(model, torch.zeros(1, 4, dtype=torch.int64), 5), Tensor)
assert_type(engram.statistics.hash_statistics(layer.hash, torch.zeros(1, 4, dtype=torch.int64)).orders[0].unique, float)
engram.checkpoint.load_reference_checkpoint(layer, ["a.safetensors", Path("b.safetensors")], progress=True)


def shard(model: LanguageModel) -> LanguageModel:
    return engram.distributed.shard_tables(model, sharding="heads")
'''

WRONG = {  # a line that must not pass, and what mypy says of it
    'EngramConfig(hidden_size="32", vocab_size=100)': "arg-type",
    "EngramConfig(32, 100)": "call-arg|misc",
    "layer.init_state(2.5)": "arg-type",
    "ops.embedding(table, rows[0], spares_grad=True)": "call-arg",
    "state.poistion": "attr-defined",
    "engram.optim.SGD(layer.parameters())": "call-arg",
    "engram.optimisers": "attr-defined",
    "token_map.ids = 3": "assignment",
    "quantize_table(table, progress=1.5)": "arg-type",
}


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    """Runs mypy with one cache for all; returns exit status and output."""
    folder = tmp_path_factory.mktemp("mypy")

    def run(*arguments, cwd=folder):
        command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", folder / "cache", *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_package_is_strictly_typed(mypy):
    assert mypy(cwd=TREE) == (0, "")


def test_a_program_gets_types(mypy, tmp_path):
    """As a user has it: the package found where it is installed, by its py.typed, and no configuration of ours."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert mypy("--strict", program, cwd=tmp_path) == (0, "")
    first = PROGRAM.count("\n") + 1
    program.write_text(PROGRAM + "".join(f"{line}\n" for line in WRONG))
    _, output = mypy("--strict", program, cwd=tmp_path)
    found = dict(re.findall(r"^program\.py:(\d+): error: .*\[([\w-]+)\]$", output, re.MULTILINE))
    for number, (line, codes) in enumerate(WRONG.items(), first):
        assert re.fullmatch(codes, found.get(str(number), "")), (line, output)
    assert len(found) == len(WRONG), output
