"""engram.distributed over gloo: what sharded tables give is what one table gives, at world sizes 1 to 4."""
import re
import sysconfig
import time
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import sharded_cases
import torch
from crew import SECONDS, SIZE, Crew, launch
from engram import EngramConfig
from engram.distributed import Layout
from engram.distributed.plan import Machine, make_plan
from hypothesis import strategies as st

WORLDS = range(1, SIZE + 1)
SHARDINGS = ("rows", "heads", "strided-heads")


@pytest.fixture(scope="module")
def crew():
    crew = Crew()
    yield crew
    crew.stop()


@st.composite
def lookups(draw):
    """A table, how it is cut for each world size, and what the ranks look up in it."""
    sizes = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=6)))
    sharding, equal = draw(st.sampled_from(SHARDINGS)), draw(st.booleans())
    multiple = draw(st.sampled_from([1, 1, 7]))
    total = sum(sizes) + -sum(sizes) % multiple if sharding == "rows" else len(sizes)
    splits = {world: None for world in WORLDS}
    if sharding != "strided-heads" and draw(st.booleans()):
        for world in WORLDS:
            cuts = sorted(draw(st.lists(st.integers(0, total), min_size=world - 1, max_size=world - 1)))
            splits[world] = [b - a for a, b in zip([0, *cuts], [*cuts, total])]
    tokens = draw(st.lists(st.integers(0, 9), min_size=SIZE, max_size=SIZE))
    return splits, dict(
        sizes=sizes, dim=draw(st.sampled_from([1, 3, 16])), sharding=sharding,
        tokens=[tokens[0]] * SIZE if equal else tokens, equal=equal, sparse=draw(st.booleans()),
        masked=draw(st.booleans()), hot=draw(st.booleans()), scale=draw(st.sampled_from([1.0, 0.5])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        index=draw(st.sampled_from([torch.int64, torch.int32])), seed=draw(st.integers(0, 99)),
        prefetch=draw(st.booleans()), multiple=multiple, format=draw(st.sampled_from(["fp8", "int8"])),
    )


def drawn(count: int) -> list:
    cases = []

    @hypothesis.settings(max_examples=count, phases=[hypothesis.Phase.generate])
    @hypothesis.given(lookups())
    def collect(case):
        cases.append(case)

    collect()
    return cases


@pytest.mark.parametrize("world", WORLDS)
def test_lookups(crew, world):
    """Forward and exact sums bit for bit, inexact sums up to their order; the same initial rows."""
    cases = [case | dict(splits=splits[world]) for splits, case in drawn(40)]
    cases += [dict(sizes=(5, 7, 2), dim=3, sharding=sharding, tokens=[0] * SIZE, equal=equal, sparse=equal)
              for sharding in SHARDINGS for equal in (False, True)]
    assert crew.run(sharded_cases.lookup, world, cases=cases) == [len(cases)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_quantized_lookups(crew, world):
    """Of any bytes, bit for bit; whole heads send exactly values and scales of each slot."""
    cases = [case | dict(splits=splits[world]) for splits, case in drawn(40)]
    assert crew.run(sharded_cases.quantized_lookup, world, cases=cases) == [len(cases)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_initial_rows_of_many_blocks(crew, world):
    """More than one block of 2**20 elements, cut within blocks."""
    cases = [dict(sizes=(30_000, 41_001, 777), dim=32, sharding=sharding, tokens=[20] * SIZE) for sharding in SHARDINGS]
    crew.run(sharded_cases.lookup, world, cases=cases)


def test_refusals(crew):
    crew.run(sharded_cases.refusals, 2)


def test_prefetch_misuse(crew):
    crew.run(sharded_cases.prefetch_misuse, 3)


def test_what_one_rank_refuses(crew):
    began = time.monotonic()
    crew.run(sharded_cases.refused_by_one, 3)
    assert time.monotonic() - began < SECONDS / 2       # nobody has waited for another


def test_lanes(crew):
    crew.run(sharded_cases.lanes, SIZE)


@pytest.mark.parametrize("world", [1, 2])
def test_copies(crew, world):
    crew.run(sharded_cases.copies, world)


def test_shared_and_discarded(crew):
    crew.run(sharded_cases.shared_and_discarded, 2)


@pytest.mark.parametrize("world", [1, 3])
def test_clipping_what_is_not_finite(crew, world):
    crew.run(sharded_cases.clipped, world)


@pytest.mark.parametrize("beside", ["nothing", "ddp", "fsdp"])
def test_models_with_quantized_tables(crew, beside):
    crew.run(sharded_cases.frozen, 2, beside=beside)


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_checkpoints_of_quantized_tables(crew, format, tmp_path):
    kinds = dict(folder=str(tmp_path), format=format)
    crew.run(sharded_cases.frozen_checkpoint, 3, sharding="rows", save=True, **kinds)
    for world, sharding in ((3, "rows"), (1, "rows"), (2, "heads"), (4, "strided-heads"), (4, "rows")):
        crew.run(sharded_cases.frozen_checkpoint, world, sharding=sharding, save=False, **kinds)


def test_state_of_a_rank_without_rows(crew, tmp_path):
    crew.run(sharded_cases.state_without_rows, 2, folder=str(tmp_path))


def test_a_backend_that_torch_has_chosen():
    assert launch(sharded_cases.unnamed_backend, 2) == [7, 7]


@pytest.mark.parametrize("world", WORLDS)
def test_full_weights(crew, world, tmp_path):
    crew.run(sharded_cases.full_weights, world, folder=str(tmp_path))


@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("world", WORLDS)
def test_full_tables(crew, world, format, tmp_path):
    crew.run(sharded_cases.full_tables, world, folder=str(tmp_path), format=format)


def test_quantized_memory_from_meta(crew, tmp_path):
    """132 MiB of values and scales over four ranks."""
    shard = (1 << 19) * 264 // SIZE
    for taken in crew.run(sharded_cases.quantized_memory_from_meta, SIZE, folder=str(tmp_path)):
        assert 0.75 * shard <= taken < 2 * shard    # some of it was there, and free, before


def test_full_size_on_meta(crew):
    """189 GiB over four ranks: nothing but numbers."""
    found = crew.run(sharded_cases.full_size, SIZE)
    assert sum(size for size, _ in found) == 768_022_850 * 264
    assert all(abs(size / (768_022_850 * 66) - 1) < 1e-4 and taken < 64 << 20 for size, taken in found)


def test_memory_from_meta(crew, tmp_path):
    """128 MiB of table over four ranks: each takes its 32 MiB, and a block of the file."""
    shard = (1 << 19) * 64 * 4 // SIZE
    for taken in crew.run(sharded_cases.memory_from_meta, SIZE, folder=str(tmp_path)):
        assert 0.75 * shard <= taken < 2.25 * shard


def test_layouts():
    layout = Layout((3, 5, 2), 2)
    assert [tuple(piece) for piece in layout.pieces] == [(0, 5, 0, 0), (5, 10, 1, 0)] and layout.local_rows == (5, 5)
    layout = Layout((3, 5, 2), 2, "heads")
    assert [tuple(piece) for piece in layout.pieces] == [(0, 3, 0, 0), (3, 10, 1, 0)] and layout.heads == (range(1), range(1, 3))
    layout = Layout((3, 5, 2), 2, "strided-heads")
    assert [tuple(piece) for piece in layout.pieces] == [(0, 3, 0, 0), (8, 10, 0, 3), (3, 8, 1, 0)]
    layout = Layout((3, 5), 4, "heads")
    assert layout.local_rows == (0, 3, 0, 5)
    assert Layout((3, 5), 3, "rows", (0, 8, 0)).local_rows == (0, 8, 0)


@hypothesis.given(lookups())
def test_layouts_cover_the_table(case):
    for world in WORLDS:
        sizes = case[1]["sizes"]
        layout = Layout(sizes, world, case[1]["sharding"], case[0][world], -sum(sizes) % case[1]["multiple"])
        assert layout.rows == sum(sizes) + layout.padding
        owned = sorted((piece.begin, piece.end) for piece in layout.pieces)
        assert [begin for begin, _ in owned] == [0, *(end for _, end in owned)][:-1] and owned[-1][1] == layout.rows
        assert sum(layout.local_rows) == layout.rows and all(begin < end for begin, end in owned)
        assert [piece.owner for piece in layout.pieces] == sorted(piece.owner for piece in layout.pieces)


@pytest.mark.parametrize("beside, loss, world", [
    ("nothing", "mean", 1), ("nothing", "mean", 4), ("nothing", "sum", 3), ("ddp", "mean", 3), ("ddp", "sum", 2),
    ("fsdp", "mean", 2), ("fsdp", "sum", 2), ("tensor", "mean", 2),
])
def test_training(crew, beside, loss, world):
    """Twenty steps beside each kind of parallelism, with clipping where that is ours."""
    crew.run(sharded_cases.training, world, beside=beside, loss=loss)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "RowWiseAdagrad", "LazyAdamW", "AdamW"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_optimizers(crew, optimizer, sharding):
    crew.run(sharded_cases.training, 3, beside="nothing", loss="mean", sharding=sharding, optimizer=optimizer)


def test_shard_tables(crew):
    crew.run(sharded_cases.swapped, 3)


@pytest.mark.slow
def test_ahead_and_compiled(crew):
    crew.run(sharded_cases.ahead, 2)


def test_unique_rows_travel(crew):
    """Beside one row a slot, at 4096 tokens: of a Zipf stream, and of the text of Python's standard library."""
    draw = np.random.default_rng(0)
    zipf = [np.minimum(draw.zipf(1.5, 4096), 129_279).tolist() for _ in range(SIZE)]
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    words = re.findall(r"\w+|[^\w\s]|\s+", "".join(file.read_text(errors="replace") for file in files))
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    text = [[numbers[word] for word in words[4096 * rank : 4096 * (rank + 1)]] for rank in range(SIZE)]
    for streams in (zipf, text):
        for unique, every in crew.run(sharded_cases.deduplicated, SIZE, streams=streams):
            assert unique < 0.7 * every


@pytest.mark.parametrize("sharding, optimizer", [
    ("rows", "RowWiseAdam"), pytest.param("strided-heads", "RowWiseAdagrad", marks=pytest.mark.slow),
    pytest.param("heads", "AdamW", marks=pytest.mark.slow),
])
def test_checkpoints(crew, sharding, optimizer, tmp_path):
    """Saved by three ranks, loaded by any number of them, cut in another way: tables and optimizers bit for bit."""
    kinds = dict(folder=str(tmp_path), optimizer=optimizer)
    expected = crew.run(sharded_cases.saved, 3, sharding=sharding, **kinds)[0]
    assert any("exp_avg_sq" in name or "sum" in name for name in expected)
    for world, other in ((2, sharding), (1, "rows"), (4, "strided-heads"), (4, "rows"), (3, "heads")):
        crew.run(sharded_cases.loaded, world, sharding=other, expected=expected, **kinds)


def test_damaged_checkpoints(crew, tmp_path):
    crew.run(sharded_cases.damaged, 3, folder=str(tmp_path))


@pytest.mark.parametrize("moment", ["forward", "backward", "save"])
def test_a_rank_that_dies(crew, moment, tmp_path):
    """The others end with an error, soon, and the checkpoint before is whole."""
    began = time.monotonic()
    assert launch(sharded_cases.dying, 3, moment=moment, folder=str(tmp_path)) == [1, 9, 1]
    assert time.monotonic() - began < 30
    for rank in (0, 2):
        assert (tmp_path / f"error-{rank}").read_text()
    assert (tmp_path / "step-2").exists() is False
    crew.run(sharded_cases.first_checkpoint, 2, folder=str(tmp_path))


@pytest.mark.parametrize("sharding, equal", [("rows", False), ("heads", True), ("strided-heads", True), ("heads", False)])
def test_plans_are_what_is_measured(crew, sharding, equal):
    """Bytes: exact where every slot travels; within the unevenness of hashes where unique rows do."""
    found = crew.run(sharded_cases.measured, 3, tokens=64, sharding=sharding, equal=equal)
    unique = float(np.mean([layer[2] for rank in found for layer in rank]))
    plan = make_plan(sharded_cases.CONFIG, ranks=3, tokens=64, sharding=sharding, dtype=torch.float32, unique=unique,
                     equal_tokens=equal, optimizer="row-wise-adagrad")
    for direction, expected in enumerate((plan.sent_forward, plan.sent_backward)):
        for rank in range(3):
            sent = sum(layer[direction] for layer in found[rank])
            assert sent == round(expected[rank]) if equal else abs(sent / expected[rank] - 1) < 0.2
    assert plan.optimizer_bytes == [4 * rows for rows in plan.rows]


def test_plans_in_numbers():
    """One layer of four equal heads, 2 ranks: of 400 slots half are away; 1 GB/s, no latency to speak of."""
    config = EngramConfig(hidden_size=8, vocab_size=50, layer_ids=(0,), heads_per_ngram=2, embed_dim_per_head=5,
                          moduli=((10, 10, 10, 10),))
    machine = Machine(bandwidth=1e9, latency=1e-9, memory=1e30)
    plan = make_plan(config, ranks=2, tokens=100, dtype=torch.bfloat16, unique=0.5, optimizer="lazy-adamw", machine=machine)
    assert plan.rows == [20, 20] and plan.table_bytes == [200, 200] and plan.optimizer_bytes == [800, 800]
    assert plan.sent_forward == plan.received_forward == [100 * 4 + 100 * 10] * 2
    assert plan.sent_backward == plan.received_backward == [100 * 20] * 2
    assert plan.forward_seconds == pytest.approx(1400e-9 + 3e-9) and plan.backward_seconds == pytest.approx(2001e-9)
    assert plan.memory_balance == plan.traffic_balance == 1
    uneven = make_plan(config, ranks=3, tokens=100, sharding="heads")
    assert uneven.rows == [10, 10, 20] and uneven.memory_balance == 1.5 and uneven.traffic_balance > 1.2
    alone = make_plan(config, ranks=1, tokens=100)
    assert alone.sent_forward == alone.received_backward == [0] and alone.traffic_balance == 1
    for dtype, row in ((torch.float8_e4m3fn, 5 + 1), (torch.int8, 5 + 4)):     # frozen, with scales
        frozen = make_plan(config, ranks=2, tokens=100, dtype=dtype, machine=machine)
        assert frozen.table_bytes == [20 * row] * 2 and frozen.optimizer_bytes == [0, 0]
        assert frozen.sent_forward == frozen.received_forward == [200 * 4 + 200 * row] * 2
        assert frozen.sent_backward == frozen.received_backward == [0, 0] and frozen.backward_seconds == 0
        assert frozen.forward_seconds == pytest.approx(200 * (4 + row) * 1e-9 + 3e-9)
    padded = EngramConfig.from_dict(config.to_dict() | dict(row_multiple=64))
    assert make_plan(padded, ranks=2, tokens=1).rows == [32, 32]
    assert make_plan(padded, ranks=4, tokens=1, sharding="heads").rows == [10, 10, 10, 34]


def test_plan_of_a_published_model():
    """189 GiB of rows with scales over eight ranks: which heads lie where makes no difference, as 24 are 8 * 3."""
    config = EngramConfig.preset("deepseek-v4.1-flash")
    for sharding in SHARDINGS:
        plan = make_plan(config, ranks=8, tokens=32768, sharding=sharding)
        assert sum(plan.rows) == 768_022_850 and sum(plan.table_bytes) == 202_758_032_400
        assert plan.memory_balance < 1.0001 and plan.traffic_balance < 1.0001
        slots = 2 * 24 * 32768
        assert plan.sent_forward == pytest.approx([slots * 7 / 8 * (256 + 8 + 4)] * 8, rel=1e-4)
        assert plan.optimizer_bytes == plan.sent_backward == plan.received_backward == [0] * 8
    five = {sharding: make_plan(config, ranks=5, tokens=32768, sharding=sharding) for sharding in SHARDINGS}
    assert five["rows"].memory_balance < 1.0001 and five["heads"].memory_balance == pytest.approx(5 / 4.8, rel=1e-4)


@pytest.mark.parametrize("options, message", [
    (dict(ranks=0), "ranks must be at least 1, got 0"), (dict(tokens=0), "tokens must be at least 1"),
    (dict(unique=0.0), "unique must be in (0, 1], got 0.0"), (dict(optimizer="adam"), "optimizer must be one of"),
    (dict(sharding="columns"), "sharding must be one of"),
])
def test_wrong_plans(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(sharded_cases.CONFIG, **dict(ranks=2, tokens=5) | options)
    with pytest.raises(ValueError, match="bandwidth must be positive, got 0"):
        Machine(bandwidth=0)
