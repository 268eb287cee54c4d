"""Sizes of configurations against the modules themselves and published numbers; budgets that are kept and used up."""
import json

import pytest
import torch

from engram import EngramConfig, nn, sizing
from engram.models.hybrid import EngramLayer

V41 = EngramConfig.preset("deepseek-v4.1-flash")


def test_deepseek_v41():
    sizes = V41.describe(torch.bfloat16)
    assert [layer.rows for layer in sizes.layers] == [384006168, 384016682]
    assert [layer.layer_id for layer in sizes.layers] == [1, 14]
    assert sizes.layers[0].other_parameters == 6144 * 25600 + 2 * 4 * 5120
    assert sizes.total.table_parameters == (384006168 + 384016682) * 256
    assert sizes.total.table_bytes == (384006168 + 384016682) * 264
    assert [layer.read_bytes_per_token for layer in (*sizes.layers, sizes.total)] == [6336, 6336, 12672]


def test_qwen():
    total = EngramConfig.preset("qwen3.8-flash-next").describe(torch.bfloat16).total
    assert (total.rows, total.table_bytes, total.read_bytes_per_token) == (320001536, 320001536 * 320, 5120)


def test_parameters_of_the_paper():
    assert EngramConfig.preset("paper-27b").describe().total.table_parameters == pytest.approx(5.792e9, rel=1e-3)
    assert EngramConfig.preset("paper-40b").describe().total.table_parameters == pytest.approx(18.534e9, rel=1e-3)


@pytest.mark.parametrize("fields", [
    {}, dict(branches=2, kernel_size=0), dict(bias=False, table_dtype="bfloat16"),
    dict(max_ngram_size=2, layer_ids=(3,)),
    dict(moduli=((1,) * 8, (5,) * 8), heads_per_ngram=4), dict(table_dtype="float8_e4m3fn"), dict(table_dtype="int8"),
    dict(row_multiple=128, shared_norms=True), dict(gate="none"),
])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_sizes_are_those_of_the_modules(fields, dtype):
    config = EngramConfig(**dict(hidden_size=12, vocab_size=100, table_size=11, embed_dim_per_head=8) | fields)
    sizes = config.describe(dtype)
    for size, layer_id in zip(sizes.layers, config.layer_ids, strict=True):
        layer = nn.Engram(config, layer_id, dtype=dtype)
        table = dict(layer.embedding.state_dict())
        other = [p for name, p in layer.named_parameters() if not name.startswith("embedding.")]
        rows = next(iter(table.values()))
        assert size.layer_id == layer_id and (size.rows, size.table_parameters) == (len(rows), rows.numel())
        assert size.other_parameters == sum(p.numel() for p in other)
        assert size.table_bytes == sum(tensor.nbytes for tensor in table.values())
        assert size.other_bytes == sum(p.nbytes for p in other)
        assert size.read_bytes_per_token == sum(tensor[0].nbytes for tensor in table.values()) * config.hash_columns
    assert sizes.total.rows == sum(size.rows for size in sizes.layers) and sizes.total.layer_id is None


def test_sizes_of_the_hybrid_layer():
    config = EngramConfig.preset("hybrid-layer", hidden_size=24, vocab_size=101)
    layer, sizes = EngramLayer.from_config(config), config.describe().total
    table = layer.multi_head_emb.embedding.weight
    assert (sizes.rows, sizes.table_bytes) == (len(table), table.nbytes)
    assert sizes.table_parameters + sizes.other_parameters == sum(p.numel() for p in layer.parameters())
    assert sizes.read_bytes_per_token == 8 * 32 * 4


def test_text_and_dict():
    sizes = V41.describe(torch.bfloat16)
    text = str(sizes)
    lines = text.splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1 and repr(sizes) == text
    assert lines[1].split()[:2] == ["1", "384,006,168"] and lines[3].split()[0] == "all" and "GiB" in text
    assert lines[3].endswith("12,672 B")
    record = json.loads(json.dumps(sizes.to_dict()))
    assert record["layers"][1]["rows"] == 384016682 and record["total"]["rows"] == 384006168 + 384016682


@pytest.mark.parametrize("size, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")])
def test_units(size, text):
    assert sizing.binary_unit(size) == text


@pytest.mark.parametrize("unit", sizing.UNITS)
@pytest.mark.parametrize("budget", [300_000, 10**9, 4 * 2**40])
@pytest.mark.parametrize("fields", [{}, dict(layer_ids=(2,), max_ngram_size=4, table_dtype="bfloat16", pad_id=1),
                                    dict(row_multiple=128, table_dtype="int8")])
def test_suggested_tables_fit_and_leave_little(unit, budget, fields):
    config = EngramConfig.suggest(budget=budget, unit=unit, hidden_size=128, vocab_size=1000, **fields)
    total = config.describe().total
    used = total.table_bytes if unit == "bytes" else total.table_parameters
    bigger = EngramConfig.from_dict({**config.to_dict(), "table_size": config.table_size + 1}).describe().total
    # A bound that is itself no prime gives the same tables as the next one; the largest that fits is what comes back.
    assert used <= budget < (bigger.table_bytes if unit == "bytes" else bigger.table_parameters)
    assert used > 0.95 * budget or budget < 10**6
    for name, value in fields.items():
        assert getattr(config, name) == (getattr(torch, value) if isinstance(value, str) else value)


@pytest.mark.parametrize("hidden_size, columns, width", [
    (1024, {}, 64), (2560, {}, 160), (5120, dict(max_ngram_size=4), 224), (16, {}, 32),
    (100, dict(embed_dim_per_head=5), 5),
])
def test_suggested_row_width(hidden_size, columns, width):
    config = EngramConfig.suggest(10**8, hidden_size=hidden_size, vocab_size=1000, **columns)
    assert config.embed_dim_per_head == width


@pytest.mark.parametrize("change, message", [
    (dict(budget=0), "budget must be a number of bytes >= 1, got 0"),
    (dict(budget=float("inf")), "budget must be a number of bytes >= 1, got inf"),
    (dict(budget="8 GiB"), "budget must be a number of bytes >= 1, got '8 GiB'"),
    (dict(budget=100), r"budget must be at least [\d,]+ bytes for 32 tables of these sizes, got 100"),
    (dict(unit="rows"), "unit must be one of 'bytes', 'parameters', got 'rows'"),
    (dict(table_size=5), "table_size must not be given"),
    (dict(moduli=((1,),)), "moduli must not be given"),
    (dict(hiden=5), "EngramConfig has no field hiden"),
    (dict(hidden_size=0), "hidden_size must be an integer >= 1, got 0"),
])
def test_wrong_budgets(change, message):
    with pytest.raises(ValueError, match=message):
        EngramConfig.suggest(**dict(budget=10**8, hidden_size=64, vocab_size=1000) | change)


def test_the_smallest_budget_named_is_one_that_works():
    with pytest.raises(ValueError) as error:
        EngramConfig.suggest(1, hidden_size=64, vocab_size=1000)
    least = int(str(error.value).split("at least ")[1].split()[0].replace(",", ""))
    assert EngramConfig.suggest(least, hidden_size=64, vocab_size=1000).table_size in (1, 2)
    with pytest.raises(ValueError, match="at least"):
        EngramConfig.suggest(least - 1, hidden_size=64, vocab_size=1000)
