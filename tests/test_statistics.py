"""Hash statistics against sets of n-grams, gate statistics against the formula; nothing is kept alive, no hook left."""
import gc
import json
import math
import weakref
from collections import Counter, defaultdict

import pytest
import torch

from engram import EngramConfig, TokenMap, nn, reference
from engram.models.hybrid import EngramLayer
from engram.statistics import GATE_BINS, MAX_LOAD, hash_statistics, record_gates

SMALL = dict(hidden_size=8, vocab_size=30, embed_dim_per_head=4, heads_per_ngram=2, layer_ids=(0, 5))


def windows(ids, size, documents=None, mask=None):
    """Every visible position's n-gram as a tuple, None where nothing is to be seen, newest first."""
    found = []
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            if mask is not None and not mask[b, t]:
                continue
            window, open_ = [], True
            for s in range(size):
                open_ = open_ and t >= s and (mask is None or bool(mask[b, t - s]))
                open_ = open_ and (documents is None or documents[b, t - s] == documents[b, t])
                window.append(int(ids[b, t - s]) if open_ else None)
            found.append(((b, t), tuple(window)))
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_hash_statistics_are_those_of_the_ngrams(packed, masked):
    torch.manual_seed(0)
    token_map = TokenMap([i // 2 for i in range(30)])
    config = EngramConfig(**SMALL, table_size=23, compressed_vocab_size=15, pad_id=0)
    module = nn.NgramHash(config, token_map)
    ids = torch.randint(2, 12, (2, 60))
    documents = torch.arange(60).expand(2, 60) // 25 if packed else None
    mask = torch.rand(2, 60) > 0.1 if masked else None
    options = dict(document_ids=documents, mask=mask)
    statistics = hash_statistics(module, ids, **options)
    rows = module(ids, **options)
    assert [(o.layer_id, o.order) for o in statistics.orders] == [(0, 2), (0, 3), (5, 2), (5, 3)]
    for usage in statistics.orders:
        seen = Counter(ngram for _, ngram in windows(ids // 2, usage.order, documents, mask))
        assert (usage.lookups, usage.ngrams) == (seen.total(), len(seen))
        assert usage.unique == len(seen) / seen.total()
        alone = set()
        for head in usage.heads:
            layer, column = config.layer_ids.index(usage.layer_id), (usage.order - 2) * 2 + head.head
            inside, reads = defaultdict(set), Counter()
            for (b, t), ngram in windows(ids // 2, usage.order, documents, mask):
                row = int(rows[layer, b, t, column])
                inside[row].add(ngram)
                reads[row] += 1
            assert (head.rows, head.touched) == (int(module.moduli[layer, column]), len(inside))
            loads = Counter(min(len(ngrams), MAX_LOAD) for ngrams in inside.values())
            assert head.loads == tuple(loads[n] for n in range(1, MAX_LOAD + 1))
            doubling = Counter(int(math.log2(n)) for n in reads.values())
            assert head.reads == tuple(doubling[n] for n in range(max(doubling) + 1))
            assert head.collided == pytest.approx(1 - sum(len(n) for n in inside.values() if len(n) == 1) / len(seen))
            assert head.busiest == max(reads.values()) / seen.total()
            assert head.expected == pytest.approx(1 - (1 - 1 / head.rows) ** (len(seen) - 1))
            alone |= {ngram for ngrams in inside.values() if len(ngrams) == 1 for ngram in ngrams}
        assert usage.alone == pytest.approx(len(alone) / len(seen))
    text = str(statistics).splitlines()
    assert len(text) == 1 + 2 * 2 * 2 and len({len(line) for line in text}) == 1
    assert json.loads(json.dumps(statistics.to_dict()))["orders"][1]["heads"][0]["rows"] == int(module.moduli[0, 2])


def test_tables_of_one_row_and_no_tokens():
    module = nn.NgramHash(EngramConfig(**SMALL, moduli=((1,) * 4,) * 2))
    ids = torch.randint(30, (1, 40))
    for usage in hash_statistics(module, ids).orders:
        assert usage.alone == 0 and all(h.touched == h.collided == h.busiest == 1 for h in usage.heads)
    for usage in hash_statistics(module, ids[:, :0]).orders:
        assert (usage.lookups, usage.ngrams, usage.unique, usage.alone) == (0, 0, 0, 0)
        assert all(h.touched == h.collided == h.busiest == 0 and h.reads == () for h in usage.heads)


def test_a_good_hash_collides_as_an_ideal_one():
    module = nn.NgramHash(EngramConfig(**SMALL | dict(vocab_size=5000, table_size=20_000)))
    for usage in hash_statistics(module, torch.randint(5000, (1, 20_000))).orders:
        for head in usage.heads:
            assert head.collided == pytest.approx(head.expected, abs=0.02)


def test_memory_is_not_that_of_the_tables():
    config = EngramConfig(**SMALL | dict(layer_ids=(1,), max_ngram_size=4, table_size=2**40))
    usage = hash_statistics(nn.NgramHash(config), torch.randint(30, (1, 50))).orders[0]
    assert usage.heads[0].rows > 2**40 and usage.alone == 1


def test_the_module_is_left_alone():
    module = nn.NgramHash(EngramConfig(**SMALL, table_size=11))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    hash_statistics(module, torch.randint(30, (1, 9)))
    assert all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())


# ------------------------------------------------------------------------------------------------------------- gates


def model_of(**fields):
    config = EngramConfig(**SMALL | dict(table_size=31, branches=3) | fields)
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"first": nn.Engram(config, 0), "second": nn.Engram(config, 5)})


def gates_of(layer, hidden, ids, mask=None):
    """alpha [n, G]: what the gate makes of a value of ones."""
    memory = layer.embedding(layer.hash(ids, mask=mask)[0], mask).flatten(-2)
    key = layer.key_proj(memory).unflatten(-1, hidden.shape[2:])
    alpha = reference.gate(
        hidden, key, torch.ones_like(key[..., 0, :]), layer.gate.hidden_weight, layer.gate.key_weight,
        eps=torch.finfo(hidden.dtype).eps, zero_rule=layer.config.zero_rule,
    )[..., 0].detach().double()
    return alpha.flatten(0, 1) if mask is None else alpha[mask]


@pytest.mark.parametrize("fields", [{}, dict(kernel_size=0), dict(zero_rule="copysign")])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_gates_are_those_of_the_formula(fields, masked, grad):
    model = model_of(**fields)
    hidden, ids = torch.randn(2, 7, 3, 8), torch.randint(30, (2, 7))
    hidden[0, 2] = 0
    mask = torch.rand(2, 7) > 0.3 if masked else None
    with record_gates(model) as gates, torch.set_grad_enabled(grad):
        out = model["first"](hidden, ids, mask=mask)
        model["second"](hidden, ids, mask=mask)
        model["second"](hidden, ids, mask=mask)
    assert list(gates.layers) == ["first", "second"]
    with torch.set_grad_enabled(grad):
        assert out.equal(model["first"](hidden, ids, mask=mask))
    for name, times in (("first", 1), ("second", 2)):
        expected, got = gates_of(model[name], hidden, ids, mask), gates.layers[name]
        assert got.count.tolist() == [times * len(expected)] * 3
        for value, wanted in ((got.mean, expected.mean(0)), (got.std, expected.std(0, correction=0)),
                              (got.minimum, expected.amin(0)), (got.maximum, expected.amax(0))):
            assert not value.requires_grad and value.allclose(wanted, atol=1e-6)
        assert got.histogram.sum(1).tolist() == got.count.tolist()
        middles = (torch.arange(GATE_BINS) + 0.5) / GATE_BINS
        assert ((got.histogram * middles).sum(1) / got.count).allclose(expected.float().mean(0), atol=1 / GATE_BINS)
        zeros = 0 if masked and not mask[0, 2] else 1
        assert (got.clamped * got.count).round().tolist() == [zeros * times] * 3
    assert len(str(gates).splitlines()) == 1 + 2 * 3
    assert json.loads(json.dumps(gates.to_dict()))["second"]["count"] == [2 * len(expected)] * 3


def test_chunks_with_a_state_count_as_one_pass():
    layer = model_of()["first"]
    hidden, ids = torch.randn(2, 7, 3, 8), torch.randint(30, (2, 7))
    with record_gates(layer) as whole:
        layer(hidden, ids)
    state = layer.init_state(2)
    with record_gates(layer) as parts:
        for now in (slice(0, 3), slice(3, 3), slice(3, 4), slice(4, 7)):
            layer(hidden[:, now], ids[:, now], state=state)
    assert list(whole.layers) == ["Engram"]
    assert parts.layers["Engram"].count.equal(whole.layers["Engram"].count)
    assert parts.layers["Engram"].histogram.equal(whole.layers["Engram"].histogram)


def test_the_hybrid_layer_and_its_lone_branch():
    layer = EngramLayer(8, 30)
    x, ids = torch.randn(2, 5, 8), torch.randint(30, (2, 5))
    with record_gates(torch.nn.Sequential(layer)) as gates:
        layer(x, ids)
        layer(x)  # no ids, no gate
    assert list(gates.layers) == ["0"] and gates.layers["0"].count.tolist() == [10]


def test_other_modules_and_dtypes():
    inside, outside = model_of(), model_of()
    hidden, ids = torch.randn(1, 4, 3, 8), torch.randint(30, (1, 4))
    with record_gates(inside) as gates:
        outside["first"](hidden, ids)
        inside.bfloat16()["first"](hidden.bfloat16(), ids)
    assert list(gates.layers) == ["first"] and gates.layers["first"].count.tolist() == [4, 4, 4]
    with record_gates(inside) as gates:
        pass
    assert gates.layers == {} and len(str(gates).splitlines()) == 1


def test_no_graph_and_no_hook_is_left():
    model = model_of()
    hidden, ids = torch.randn(2, 7, 3, 8, requires_grad=True), torch.randint(30, (2, 7))
    with record_gates(model) as gates:
        out = model["first"](hidden, ids)
        out.sum().backward()  # backward passes are not counted
        dead = [weakref.ref(out), weakref.ref(hidden)]
        del out, hidden
    gc.collect()
    assert [ref() for ref in dead] == [None, None] and gates.layers["first"].count.tolist() == [14] * 3
    model["first"](torch.randn(2, 7, 3, 8), ids)
    assert gates.layers["first"].count.tolist() == [14] * 3
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_error_in_the_model_leaves_the_record_in_order():
    model = model_of()
    hidden, ids = torch.randn(1, 4, 3, 8), torch.randint(30, (1, 4))
    with record_gates(model) as gates:
        with pytest.raises(IndexError):
            model["second"].hash(ids)[5]
        with pytest.raises(ValueError):
            model["second"](hidden[..., :5], ids)
        model["first"](hidden, ids)
    assert list(gates.layers) == ["first"]
    with pytest.raises(ValueError), record_gates(model):
        model["second"](hidden[..., :5], ids)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_gates_that_are_not_numbers():
    layer = model_of()["first"]
    hidden, ids = torch.randn(1, 4, 3, 8), torch.randint(30, (1, 4))
    hidden[0, 1, 2] = torch.nan
    with record_gates(layer) as gates:
        layer(hidden, ids)
    found = gates.layers["Engram"]
    assert found.mean.isnan().tolist() == [False, False, True] and found.histogram.sum(1).tolist() == [4, 4, 3]
    assert gates.to_dict()["Engram"]["mean"][2] is None
