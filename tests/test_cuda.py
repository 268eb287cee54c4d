"""What only the CUDA kernels have: ids that cannot be refused in time, CUDA graphs, streams, more than one device.

All else is tested once for each of samples.DEVICES. Under the emulator (cpp/emulated.py) the CUDA kernels run on the
CPU: what needs no driver is tested there, too.
"""
import sys

import pytest
import torch
from engram import EngramConfig, TokenMap, nn, ops
from engram.state import EngramState
from samples import DEVICES, DIFFERENTIABLE, DTYPES, each_sample, named, results_of
from test_determinism import LARGE

KERNELS = "cuda" if "cuda" in DEVICES else "cpu"        # where the CUDA kernels run
MISSING = "torch.cuda.is_available() is False" if not torch.cuda.is_available() else "build_info()['cuda'] is None"
needs_kernels = pytest.mark.skipif(
    KERNELS == "cpu" and "emulated" not in sys.modules, reason=f"{MISSING}, and this is no run with `-p emulated`")
needs_gpu = pytest.mark.skipif(KERNELS == "cpu", reason=MISSING)
HOLD = 200_000_000              # cycles that a stream is held up for: 0.1 s, far longer than the host needs


# Ids out of range


def hash_inputs(**changes) -> dict:
    inputs = named("ngram_hash", "map")[0](KERNELS)
    return inputs | changes


@needs_kernels
@pytest.mark.parametrize("bad", [-1, -100, 50, torch.iinfo(torch.int64).max])
def test_bad_token_ids_count_as_masked(bad):
    inputs = hash_inputs()
    inputs["token_ids"][1, 5] = bad
    mask = torch.ones_like(inputs["token_ids"], dtype=torch.bool)
    mask[1, 5] = False
    assert torch.equal(ops.ngram_hash(**inputs), ops.ngram_hash(**inputs | dict(mask=mask)))


@needs_kernels
@pytest.mark.parametrize("bad", [-1, -100, 37, torch.iinfo(torch.int64).max])
def test_bad_rows_read_as_zero(bad):
    inputs = named("embedding", "plain")[0](KERNELS, torch.float32)
    table = inputs["table"].requires_grad_()
    expected = ops.embedding(**inputs).detach()
    expected[1, 2, 3] = 0
    touched = torch.ones(2, 5, 4, dtype=torch.bool, device=KERNELS)
    touched[1, 2, 3] = False
    read = torch.bincount(inputs["rows"][touched], minlength=37)
    inputs["rows"][1, 2, 3] = bad
    out = ops.embedding(**inputs)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert torch.equal(table.grad, read[:, None].float().expand_as(table))


@needs_kernels
@pytest.mark.parametrize("bad", [-1, -100, 37, torch.iinfo(torch.int64).max])
@pytest.mark.parametrize("op", ["embedding_fp8", "embedding_int8"])
def test_bad_rows_of_quantised_tables(op, bad, monkeypatch):
    inputs = named(op, "plain")[0](KERNELS, torch.float32)
    lookup = getattr(ops, op)
    expected = lookup(**inputs)
    expected[1, 2, 3] = 0
    inputs["rows"][1, 2, 3] = bad
    assert torch.equal(lookup(**inputs), expected)
    monkeypatch.setenv("ENGRAM_DEBUG", "1")
    with pytest.raises(IndexError, match=rf"^{op}: rows must be in \[0, 37\)"):
        lookup(**inputs)


@needs_kernels
def test_debug_makes_bad_ids_an_error(monkeypatch):
    hashing, lookup = hash_inputs(), named("embedding", "plain")[0](KERNELS)
    monkeypatch.setenv("ENGRAM_DEBUG", "1")
    rows, values = ops.ngram_hash(**hashing), ops.embedding(**lookup)
    hashing["token_ids"][0, 0], lookup["rows"][0, 0, 0] = 50, 37
    with pytest.raises(IndexError, match=r"^ngram_hash: token_ids and history must be in \[0, 50\)"):
        ops.ngram_hash(**hashing)
    with pytest.raises(IndexError, match=r"^embedding: rows must be in \[0, 37\)"):
        ops.embedding(**lookup)
    monkeypatch.setenv("ENGRAM_DEBUG", "0")
    assert ops.ngram_hash(**hashing).shape == rows.shape and ops.embedding(**lookup).shape == values.shape


def decoding_layer(dtype=torch.float64) -> nn.Engram:
    config = EngramConfig(hidden_size=40, vocab_size=50, branches=2, heads_per_ngram=2, embed_dim_per_head=8,
                          table_size=300, layer_ids=(1,), conv_init="default")
    torch.manual_seed(0)
    layer = nn.Engram(config, 1, token_map=TokenMap([i * 7 % 30 for i in range(50)]), dtype=dtype)
    return layer.requires_grad_(False).to(KERNELS)


def steps_of(layer: nn.Engram, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    state = layer.init_state(ids.shape[0])
    return torch.cat([layer(hidden[:, t : t + 2], ids[:, t : t + 2], state=state) for t in range(0, ids.shape[1], 2)], 1)


@needs_kernels
@pytest.mark.parametrize("bad", [-1, 50, torch.iinfo(torch.int64).max])
def test_bad_ids_count_as_masked_in_a_step(bad, monkeypatch):
    """Also for the tokens after it, those of the next step included: as in the ops that a step stands for."""
    layer, generator = decoding_layer(), torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 8, 2, 40, generator=generator, dtype=torch.float64).to(KERNELS)
    ids = torch.randint(50, (2, 8), generator=generator).to(KERNELS)
    good = steps_of(layer, hidden, ids)
    ids[1, 3] = bad
    found = steps_of(layer, hidden, ids)
    monkeypatch.setattr(nn, "_DECODED_TOKENS", 0)
    torch.testing.assert_close(found, steps_of(layer, hidden, ids), rtol=1e-11, atol=1e-11)
    assert torch.equal(found[0], good[0]) and torch.equal(found[1, :3], good[1, :3])
    assert (found[1, 3:6] != good[1, 3:6]).any(-1).all()


@needs_kernels
@pytest.mark.parametrize("argument, position, value, message", [
    ("token_ids", (1, 2), 40, r"^decode: token_ids must be in \[0, 40\), the ids of token_map, got an id outside"),
    ("offsets", (0, 1), 2**40, r"^decode: rows must be in \[0, \d+\), the rows of table, got a row outside"),
])
def test_debug_makes_a_bad_step_an_error(argument, position, value, message, monkeypatch):
    """And leaves the state alone."""
    inputs = named("decode", "plain")[0].at(tokens=3)(KERNELS)
    inputs[argument][position] = value
    before = [x.clone() for x in inputs["history"] + inputs["conv"]]
    monkeypatch.setenv("ENGRAM_DEBUG", "1")
    with pytest.raises(IndexError, match=message):
        ops.decode(**inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs["history"] + inputs["conv"], before))
    monkeypatch.setenv("ENGRAM_DEBUG", "0")
    assert ops.decode(**inputs).isfinite().all()
    assert (inputs["conv"][0] == before[6] + 3).all()


# The same integers and the same copies on every device


@needs_gpu
@pytest.mark.parametrize("op, sample", each_sample("ngram_hash"), ids=str)
def test_row_ids_equal_those_of_the_cpu(op, sample):
    assert torch.equal(ops.ngram_hash(**sample(KERNELS)).cpu(), ops.ngram_hash(**sample("cpu")))


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, sample", each_sample("embedding", "embedding_fp8", "embedding_int8"), ids=str)
def test_lookups_equal_those_of_the_cpu(op, sample, dtype):
    lookup = getattr(ops, op)
    assert torch.equal(lookup(**sample(KERNELS, dtype)).cpu(), lookup(**sample("cpu", dtype)))


# Graphs and streams


def passed(op: str, inputs: dict, grad_out: torch.Tensor | None) -> list[torch.Tensor]:
    """Results of the op and, with a gradient to come in, its gradients."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in DIFFERENTIABLE.get(op, ())}
    if not leaves:
        return results_of(op, getattr(ops, op), inputs)
    out = getattr(ops, op)(**{**inputs, **leaves})
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad_out)]


def two_inputs(op: str, dtype: torch.dtype) -> tuple[dict, dict, torch.Tensor | None]:
    """The same case with other numbers, ids and masks, and a gradient to come in."""
    inputs, fresh = (LARGE[op]("cuda", dtype, seed) for seed in (0, 1))
    if op not in DIFFERENTIABLE:
        return inputs, fresh, None
    return inputs, fresh, torch.randn_like(getattr(ops, op)(**inputs))


def overwrite(inputs: dict, fresh: dict) -> None:
    for name, value in fresh.items():
        for mine, new in zip(*(x if isinstance(x, list) else [x] for x in (inputs[name], value))):
            if isinstance(new, torch.Tensor):
                mine.copy_(new)


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def captured(function):
    """A CUDA graph of `function`, and the result, which every replay overwrites. Waiting for the device, or memory that
    is not torch's, would be refused."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", LARGE)
def test_graph_of_an_op(op, dtype):
    """Forward and backward replayed with other numbers, ids, documents and masks: the bits of calling the op."""
    inputs, fresh, grad_out = two_inputs(op, dtype)
    first, second = passed(op, inputs, grad_out), passed(op, fresh, grad_out)
    assert not equal(first, second)
    graph, result = captured(lambda: passed(op, inputs, grad_out))
    graph.replay()
    assert equal(result, first)
    overwrite(inputs, fresh)
    for _ in range(3):
        graph.replay()
        assert equal(result, second)


@needs_gpu
@pytest.mark.parametrize("branches", [1, 4])
def test_graph_of_the_layer(branches):
    """Hash, lookup, projections, gate and convolution in one graph, forward and backward, with ids that change."""
    config = EngramConfig(hidden_size=64, vocab_size=500, branches=branches, heads_per_ngram=2, embed_dim_per_head=8,
                          table_size=300, layer_ids=(1,), conv_init="default")
    torch.manual_seed(0)
    layer = nn.Engram(config, 1, device="cuda", dtype=torch.float64)
    shape = (2, 100, branches, 64) if branches > 1 else (2, 100, 64)
    hidden = torch.randn(shape, device="cuda", dtype=torch.float64, requires_grad=True)
    ids = torch.randint(500, (2, 100), device="cuda")
    documents = torch.randint(2, (2, 100), device="cuda").cumsum(1)
    leaves = [hidden, *layer.parameters()]

    def step():
        out = layer(hidden, ids, document_ids=documents)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    graph, result = captured(step)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids.copy_(torch.randint(500, (2, 100), generator=generator))
        documents.copy_(torch.randint(2, (2, 100), generator=generator).cumsum(1))
        graph.replay()
        for found, expected in zip(result, step(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_graph_of_a_decoding_step(dtype):
    """Captured for four sequences and replayed for fewer: what stands at the others is poison, and their state stays."""
    layer, generator = decoding_layer(dtype), torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 4, 1, 2, 40, generator=generator).to("cuda", dtype)
    ids = torch.randint(50, (12, 4, 1), generator=generator).cuda()
    state, fresh = layer.init_state(4), layer.init_state(4)
    inputs = dict(hidden=hidden[0].clone(), token_ids=ids[0].clone(), lengths=torch.ones(4, dtype=torch.int64).cuda())
    graph, out = captured(lambda: layer(**inputs, state=state))
    for ring in state.rings.values():
        for tensor in ring.tensors.values():
            tensor.zero_()
    for step, live in enumerate((4, 4, 3, 1, 2, 0, 4, 1, 1, 3, 4, 2)):
        poisoned = {"hidden": hidden[step].clone(), "token_ids": ids[step].clone(),
                    "lengths": (torch.arange(4) < live).long().cuda()}
        poisoned["hidden"][live:] = torch.nan
        poisoned["token_ids"][live:] = torch.iinfo(torch.int64).min
        overwrite(inputs, poisoned)
        graph.replay()
        alone = EngramState.from_state_dict({name: ring | dict(tensors={n: x[:live] for n, x in ring["tensors"].items()})
                                             for name, ring in fresh.state_dict().items()})
        if live:
            assert torch.equal(out[:live], layer(hidden[step, :live], ids[step, :live], state=alone))
        assert not out[live:].any()
        for name, ring in fresh.rings.items():      # `alone` shares its memory
            assert all(torch.equal(x, state.rings[name].tensors[n]) for n, x in ring.tensors.items())


@needs_gpu
@pytest.mark.parametrize("before, after", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("op", LARGE)
def test_side_stream(op, before, after):
    """An op runs on the current stream: after what that stream waits for, and before what waits for that stream. The
    result must be wrong as soon as either dependency is taken away, or this test could not tell."""
    inputs, fresh, grad_out = two_inputs(op, torch.float32)
    expected = passed(op, fresh, grad_out)
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        passed(op, inputs, grad_out)                    # its memory, used again, holds other results than expected
    torch.cuda.synchronize()

    with torch.cuda.stream(main):
        torch.cuda._sleep(HOLD)
        overwrite(inputs, fresh)
    if before:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        if not after:
            torch.cuda._sleep(HOLD)
        found = passed(op, inputs, grad_out)
    if after:
        main.wait_stream(side)
    with torch.cuda.stream(main):
        copies = [tensor.clone() for tensor in found]
    torch.cuda.synchronize()
    assert equal(copies, expected) == (before and after)


# Devices and sizes


@needs_gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, torch.cuda.device_count() is {torch.cuda.device_count()}")
@pytest.mark.parametrize("op", LARGE)
def test_another_device_than_the_current_one(op):
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs = LARGE[op](device, torch.float32)
        grad_out = torch.ones_like(getattr(ops, op)(**inputs)) if op in DIFFERENTIABLE else None
        found = passed(op, inputs, grad_out)
        assert all(str(tensor.device) == device for tensor in found) and torch.cuda.current_device() == 0
        results.append([tensor.cpu() for tensor in found])
    assert equal(*results)


@needs_gpu
@pytest.mark.parametrize("width", [1, 264])
def test_table_past_2_31_elements(width):
    rows = 2**31 // width + 10
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("table and gradient take 4 GiB each, and less than 12 are free")
    table = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    wanted = torch.tensor([[0, rows // 2, rows - 2, rows - 1]], device="cuda")
    values = torch.randn(4, width, device="cuda").bfloat16()
    with torch.no_grad():
        table[wanted[0]] = values
    out = ops.embedding(table, wanted)
    assert torch.equal(out[0], values)
    grad, = torch.autograd.grad(out, table, values[None])
    assert torch.equal(grad[wanted[0]], values) and not grad[rows - 3].any() and not grad[1].any()
