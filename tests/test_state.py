"""One answer however the sequence comes: in chunks, packed, padded, rolled back, after other requests, by beams."""
import copy
import io
import threading

import pytest
import torch
from engram import EngramConfig, TokenMap, ops
from engram import nn as enn
from engram.ops import Ring
from engram.state import EngramState
from hypothesis import given
from hypothesis import strategies as st
from samples import DEVICES, named

VOCAB, EOS = 40, 7
BASE = dict(hidden_size=16, vocab_size=VOCAB, branches=2, table_size=101, heads_per_ngram=2, embed_dim_per_head=4,
            layer_ids=(1,), conv_init="default", pad_id=2)
CONFIGS = {
    "plain": {},
    "order_4": dict(max_ngram_size=4, kernel_size=3, dilation=2),
    "one_branch": dict(branches=1, bias=False),
    "eos": dict(boundary="eos", eos_id=EOS),
    "conv_goes_on": dict(boundary="eos", eos_id=EOS, conv_reset=False),
    "masked_are_hashed": dict(mask_blocks_hash=False, max_ngram_size=4),
    "no_conv": dict(kernel_size=0),
    "one_tap": dict(kernel_size=1),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def build(name="plain", dtype=torch.float64, token_map=None, **options) -> enn.Engram:
    torch.manual_seed(0)
    layer = enn.Engram(EngramConfig(**BASE | CONFIGS[name] | options), 1, token_map=token_map)
    for parameter in layer.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 4)
    return layer.to(dtype)


def inputs(layer: enn.Engram, batch=2, tokens=30, seed=0, documents=True, masked=True) -> dict:
    draw = torch.Generator().manual_seed(seed)
    dtype, device = layer.value_proj.weight.dtype, layer.value_proj.weight.device
    hidden = torch.randn(batch, tokens, layer.config.branches, 16, generator=draw, dtype=torch.float64)
    x = dict(hidden=hidden.to(device, dtype), token_ids=torch.randint(12, (batch, tokens), generator=draw).to(device))
    if documents:       # A B A: an id that comes back
        x["document_ids"] = (torch.randint(5, (batch, tokens), generator=draw) == 0).cumsum(1).remainder(2).to(device)
    if masked:
        x["mask"] = (torch.rand(batch, tokens, generator=draw) > 0.2).to(device)
    return x


def at(x: dict, index) -> dict:
    return {name: tensor[:, index] for name, tensor in x.items()}


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and \
        (actual - expected).norm() <= TOLERANCE[expected.dtype] * max(1.0, expected.norm().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks(name, residual, dtype, device):
    layer = build(name, dtype).to(device)
    for packed, masked in ((False, False), (True, True)):
        x = inputs(layer, documents=packed, masked=masked)
        whole = layer(**x, residual=residual)
        for cuts in ([30], [1] * 30, [0, 13, 0, 17], [29, 1], [1, 29], [3, 9, 10, 8]):
            state, begin, parts = layer.init_state(2), 0, []
            for size in cuts:
                parts.append(layer(**at(x, slice(begin, begin + size)), residual=residual, state=state))
                begin += size
            assert close(torch.cat(parts, 1), whole), cuts
            assert state.position.tolist() == [30, 30]


@st.composite
def plans(draw):
    """A batch of sequences and how they come: chunks with lengths, rollbacks of drafts, selections of beams."""
    batch = draw(st.integers(1, 3))
    steps = draw(st.lists(st.one_of(
        st.tuples(st.just("chunk"), st.lists(st.integers(0, 6), min_size=batch, max_size=batch), st.integers(0, 3)),
        st.tuples(st.just("rollback"), st.lists(st.integers(0, 4), min_size=batch, max_size=batch)),
        st.tuples(st.just("select"), st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch)),
    ), min_size=1, max_size=8))
    return draw(st.sampled_from(sorted(CONFIGS))), batch, steps, draw(st.integers(0, 10**6))


@given(plans())
def test_any_way_to_come(plan):
    """Each row's outputs are those of one pass over the tokens that it has kept, whatever was done on the way."""
    name, batch, steps, seed = plan
    layer = build(name)
    draw = torch.Generator().manual_seed(seed)
    state = layer.init_state(batch, max_rollback=4)
    kept = [at(inputs(layer, 1, 0), slice(0, 0)) for _ in range(batch)]             # each row's tokens so far
    outputs, room = [torch.zeros(1, 0, layer.config.branches, 16).double() for _ in range(batch)], [0] * batch
    for step in steps:
        if step[0] == "chunk":
            lengths, padding = step[1], step[2]
            width = max(lengths) + padding
            x = inputs(layer, batch, width, seed=int(torch.randint(2**31, (), generator=draw)))
            for b, length in enumerate(lengths):                                    # what is padding is never read
                x["token_ids"][b, length:] = -(2**62)
                x["hidden"][b, length:] = torch.nan
            out = layer(**x, state=state, lengths=torch.tensor(lengths))
            for b, length in enumerate(lengths):
                assert not out[b, length:].any()
                kept[b] = {n: torch.cat([kept[b][n], x[n][b : b + 1, :length]], 1) for n in x}
                outputs[b] = torch.cat([outputs[b], out[b : b + 1, :length]], 1)
                room[b] = min(4, room[b] + length)
        elif step[0] == "rollback":
            count = [min(c, r) for c, r in zip(step[1], room)]
            state.rollback(torch.tensor(count))
            for b, c in enumerate(count):
                size = kept[b]["token_ids"].shape[1] - c
                kept[b], outputs[b], room[b] = at(kept[b], slice(0, size)), outputs[b][:, :size], room[b] - c
        else:
            state.select(torch.tensor(step[1]))
            kept, outputs, room = ([values[i] for i in step[1]] for values in (kept, outputs, room))
    for b in range(batch):
        assert close(outputs[b], layer(**kept[b]))
    assert state.position.tolist() == [x["token_ids"].shape[1] for x in kept]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 10**6))
def test_packed_is_separate(sizes, seed):
    """Documents in one row, forward and backward: as each alone; nothing of one reaches another."""
    layer = build("order_4")
    parts = [inputs(layer, 1, size, seed + i, documents=False, masked=False) for i, size in enumerate(sizes)]
    packed = {name: torch.cat([x[name] for x in parts], 1) for name in parts[0]}
    packed["document_ids"] = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[None]
    packed["hidden"].requires_grad_()
    out = layer(**packed)
    begin = 0
    for x in parts:
        end = begin + x["token_ids"].shape[1]
        x["hidden"].requires_grad_()
        alone = layer(**x)
        assert close(out[:, begin:end], alone)
        if end > begin:
            grad_out = torch.randn_like(alone)
            mine, = torch.autograd.grad(out[:, begin:end], packed["hidden"], grad_out, retain_graph=True)
            expected, = torch.autograd.grad(alone, x["hidden"], grad_out)
            assert close(mine[:, begin:end], expected)
            others = torch.ones(mine.shape[1], dtype=torch.bool)
            others[begin:end] = False
            assert not mine[:, others].any()
        begin = end


# The ops, bit for bit. -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["short_conv", "gate_conv"])
@pytest.mark.parametrize("sample", ["everything", "documents", "mask", "taps_5_dilation_3", "no_norm"])
def test_ops_bit_for_bit(op, sample, dtype, device):
    x = named(op, sample)[0].at(tokens=40)(device, dtype)
    reach = (x["conv_weight" if op == "gate_conv" else "weight"].shape[-1] - 1) * x["dilation"]
    cut = [n for n in ("x", "hidden", "key", "value", "document_ids", "mask") if x.get(n) is not None]
    lengths = x.pop("lengths", None)
    if lengths is not None:                     # in chunks each has lengths of its own
        within = torch.arange(40, device=device) < lengths[:, None]
        x["mask"] = within if x["mask"] is None else x["mask"] & within
        cut = [*cut, "mask"] if "mask" not in cut else cut
    whole = getattr(ops, op)(**x)
    first = x["x"] if op == "short_conv" else x["value"]
    for cuts in ([40], [1] * 40, [0, 11, 29], [2, 3, 35]):
        payload = {"x": first[:, :0]}
        if op == "gate_conv":
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            width = 3 * x["hidden"].shape[2] + 1
            payload = {"value": first[:, :0], "stats": first.new_zeros(len(first), 0, width, dtype=wide)}
        ring, begin, parts = Ring(payload, reach, 0), 0, []
        for size in cuts:
            part = {n: x[n][:, begin : begin + size] for n in cut}
            parts.append(getattr(ops, op)(**x | part, state=ring))
            begin += size
        assert torch.equal(torch.cat(parts, 1), whole), cuts


@pytest.mark.parametrize("op", ["short_conv", "gate_conv"])
def test_gradients_with_a_state(op):
    """Of the chunk's own inputs, given what came before; nothing flows into the state."""
    x = named(op, "documents")[0].at(tokens=24)("cpu", torch.float64)
    cut = [n for n in ("x", "hidden", "key", "value", "document_ids") if x.get(n) is not None]
    first = x["x"] if op == "short_conv" else x["value"]
    payload = {"x": first[:, :0]} if op == "short_conv" else {
        "value": first[:, :0], "stats": first.new_zeros(len(first), 0, 3 * x["hidden"].shape[2] + 1)}
    floats = [n for n in x if isinstance(x[n], torch.Tensor) and x[n].is_floating_point()]
    ring = Ring(payload, 9, 0)
    getattr(ops, op)(**x | {n: x[n][:, :10] for n in cut}, state=ring)
    part = x | {n: x[n][:, 10:] for n in cut}
    leaves = {n: part[n].clone().requires_grad_() for n in floats}
    out = getattr(ops, op)(**part | leaves, state=ring)
    assert not any(tensor.requires_grad for tensor in ring.tensors.values())
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out)
    whole = x | {n: x[n].clone().requires_grad_() for n in floats}
    late = torch.cat([torch.zeros_like(whole[cut[0]][:, :10]), grad_out], 1)
    expected = torch.autograd.grad(getattr(ops, op)(**whole), [whole[n] for n in floats], late)
    for name, grad, one in zip(leaves, grads, expected):
        if name in cut:
            assert close(grad, one[:, 10:]), name
        elif "conv" in name or op == "short_conv":          # the gate's weights act in the past, too, in the whole
            assert close(grad, one), name


# What serving does. --------------------------------------------------------------------------------------------------

def test_prompts_of_any_padding():
    """Left padding is no padding; right-padded prefill and then decoding is decoding without padding."""
    layer = build()
    x = inputs(layer, 1, 20, documents=False, masked=False)
    whole = layer(**x)
    for left, right in ((5, 0), (0, 4), (3, 2)):
        pad = lambda t, value: torch.cat(                                               # noqa: E731
            [t.new_full((1, left, *t.shape[2:]), value), t[:, :12], t.new_full((1, right, *t.shape[2:]), value)], 1)
        state = layer.init_state(1)
        mask = pad(torch.ones(1, 20, dtype=torch.bool), False)
        lengths = torch.tensor([left + 12])
        prefill = layer(pad(x["hidden"], torch.inf), pad(x["token_ids"], -9), mask=mask, lengths=lengths, state=state)
        assert close(prefill[:, left : left + 12], whole[:, :12]) and not prefill[:, :left].any()
        rest = [layer(**at(x, slice(t, t + 1)), state=state) for t in range(12, 20)]
        assert close(torch.cat(rest, 1), whole[:, 12:])


def test_requests_do_not_see_each_other():
    """One request after another, two at a time, and in threads: each as in a fresh module."""
    layer = build("eos")
    xs = [inputs(layer, 1, 25, seed, documents=False, masked=False) for seed in range(4)]
    expected = [layer(**x) for x in xs]
    before = copy.deepcopy(layer.state_dict())
    state = layer.init_state(1)
    for x, whole in zip(xs, expected):          # a prompt of one token after another prompt
        state.reset()
        for t in range(3):
            assert close(layer(**at(x, slice(t, t + 1)), state=state), whole[:, t : t + 1])
    states = [layer.init_state(1) for _ in xs]
    for t in range(25):
        for x, whole, state in zip(xs, expected, states):
            assert close(layer(**at(x, slice(t, t + 1)), state=state), whole[:, t : t + 1])

    found = [None] * len(xs)

    def serve(i):
        state = layer.init_state(1)
        found[i] = torch.cat([layer(**at(xs[i], slice(t, t + 1)), state=state) for t in range(25)], 1)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(close(a, b) for a, b in zip(found, expected))
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_reset_of_one_sequence():
    layer = build()
    x, y = inputs(layer, 3, 9, documents=False, masked=False), inputs(layer, 3, 9, 1, documents=False, masked=False)
    state = layer.init_state(3)
    layer(**x, state=state)
    state.reset(1)
    assert state.position.tolist() == [9, 0, 9]
    out = layer(**y, state=state)
    together = {name: torch.cat([x[name], y[name]], 1) for name in x}
    assert close(out[[0, 2]], layer(**together)[[0, 2], 9:]) and close(out[1], layer(**y)[1])


def test_clone_save_and_load():
    layer = build("eos")
    x = inputs(layer)
    state = layer.init_state(2, max_rollback=3)
    layer(**at(x, slice(0, 10)), state=state)
    addresses = [tensor.data_ptr() for ring in state.rings.values() for tensor in ring.tensors.values()]
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    copies = [state.clone(), EngramState.from_state_dict(torch.load(file)), copy.deepcopy(state), state.clone().to("cpu")]
    leaves, spec = torch.utils._pytree.tree_flatten(state)
    copies.append(torch.utils._pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec))
    expected = layer(**at(x, slice(10, 30)), state=state)
    assert close(expected, layer(**x)[:, 10:])
    for other in copies:
        assert other.position.tolist() == [10, 10] and other.max_rollback == 3
        assert torch.equal(layer(**at(x, slice(10, 30)), state=other), expected)
    assert [tensor.data_ptr() for ring in state.rings.values() for tensor in ring.tensors.values()] == addresses
    assert state.to("cpu") is state and "batch_size=2, max_rollback=3" in repr(state)


@pytest.mark.parametrize("count, message", [
    (4, r"count must be in \[0, 3\] for sequence 0 \(max_rollback is 3\), got 4"),
    (-1, r"count must be in \[0, 3\] for sequence 0 .*, got -1"),
    (torch.tensor([0, 2]), r"count must be in \[0, 1\] for sequence 1 .*, got 2"),
    (torch.tensor([1, 1, 1]), r"count must be an int or \[2\], got \[3\]"),
])
def test_rollbacks_that_cannot_be(count, message):
    layer = build()
    state = layer.init_state(2, max_rollback=3)
    layer(**inputs(layer, 2, 5), lengths=torch.tensor([5, 1]), state=state)
    with pytest.raises(ValueError, match=message):
        state.rollback(count)
    assert state.position.tolist() == [5, 1]
    with pytest.raises(ValueError, match=r"select: index must be integer \[2\]"):
        state.select(torch.tensor([0.0, 1.0]))


def test_failed_calls_append_nothing():
    layer = build(token_map=TokenMap(torch.arange(VOCAB).numpy() // 2))
    x = inputs(layer)
    state = layer.init_state(2)
    layer(**at(x, slice(0, 10)), state=state)
    bad = at(x, slice(10, 30))
    with pytest.raises(IndexError):
        layer(**bad | dict(token_ids=torch.full((2, 20), VOCAB), mask=torch.ones(2, 20, dtype=torch.bool)), state=state)
    with pytest.raises(ValueError):
        layer(**bad | dict(document_ids=torch.zeros(2, 3, dtype=torch.int64)), state=state)
    with pytest.raises(ValueError):
        layer(**bad, lengths=torch.tensor([21, 3]), state=state)
    assert close(layer(**bad, state=state), layer(**x)[:, 10:])


def test_shared_rows():
    """With `rows=` the caller keeps the history, and the state advances the convolution alone."""
    layer = build()
    hashing = enn.NgramHash(layer.config)
    x = inputs(layer, documents=False, masked=False)
    rows, state, parts = hashing(x["token_ids"]), layer.init_state(2, max_rollback=2), []
    for begin in range(0, 30, 5):
        parts.append(layer(x["hidden"][:, begin : begin + 5], rows=rows[:, :, begin : begin + 5], state=state))
    assert close(torch.cat(parts, 1), layer(**x))
    assert state.history.position.tolist() == [0, 0] and state.conv.position.tolist() == [30, 30]
    state.rollback(2)
    again = layer(x["hidden"][:, 28:], rows=rows[:, :, 28:], state=state)
    assert close(again, layer(**x)[:, 28:])


@pytest.mark.parametrize("tokens", [1, 2, 9, 10, 4096])
def test_every_length(tokens):
    layer = build(dtype=torch.float32)
    x = inputs(layer, 1, tokens, documents=False, masked=False)
    whole = layer(**x)
    state = layer.init_state(1)
    split = tokens // 2
    assert close(torch.cat([layer(**at(x, slice(0, split)), state=state), layer(**at(x, slice(split, None)), state=state)],
                           1), whole)


def test_half_precision():
    """Through the products in bfloat16 a chunk is as close to float64 as the whole is."""
    layer = build(dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()
    x = inputs(layer, documents=False, masked=False)
    expected = exact(x["hidden"].double(), x["token_ids"])
    whole = (layer(**x).double() - expected).norm() / expected.norm()
    state = layer.init_state(2)
    parts = torch.cat([layer(**at(x, slice(t, t + 1)), state=state) for t in range(30)], 1)
    assert (parts.double() - expected).norm() / expected.norm() <= 1.2 * whole + 1e-3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles(backend):
    """One graph with a state in it, and one more for any other length at most."""
    layer = build("eos", torch.float32)
    x = inputs(layer)
    whole = layer(**x)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    torch._dynamo.reset()
    state, begin = layer.init_state(2), 0
    with torch.no_grad():
        for size, stance in ((5, "default"), (3, "default"), (9, "fail_on_recompile"), (13, "fail_on_recompile")):
            with torch.compiler.set_stance(stance):
                part = compiled(**at(x, slice(begin, begin + size)), state=state)
            assert close(part, whole[:, begin : begin + size])
            begin += size
    assert state.position.tolist() == [30, 30]


def test_exports():
    layer = build("eos", torch.float32)
    x = inputs(layer, masked=False)
    state = layer.init_state(2)
    part = {name: tensor.contiguous() for name, tensor in at(x, slice(0, 6)).items()}
    tokens = torch.export.Dim("tokens", min=3)
    shapes = {name: {1: tokens} for name in part} | {"state": [None] * len(torch.utils._pytree.tree_leaves(state))}
    program = torch.export.export(layer, (), {**part, "state": state.clone()}, dynamic_shapes=shapes, strict=False)
    run = program.module()
    first = run(**part, state=state)
    second = run(**{name: tensor.contiguous() for name, tensor in at(x, slice(6, 30)).items()}, state=state)
    assert close(torch.cat([first, second], 1), layer(**x))


def test_state_with_functional_call_and_deepcopy():
    layer = build()
    x = inputs(layer)
    whole = layer(**x)
    parameters = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    state = layer.init_state(2)
    parts = [torch.func.functional_call(copy.deepcopy(layer), parameters, (), at(x, cut) | dict(state=state))
             for cut in (slice(0, 7), slice(7, 30))]
    assert close(torch.cat(parts, 1), whole)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_ahead_of_time(tmp_path):
    """Compiled by AOTInductor, with a state that it updates, for lengths that it has not seen."""
    layer = build("eos", torch.float32)
    x = inputs(layer, masked=False)
    first, second = ({name: tensor.contiguous() for name, tensor in at(x, cut).items()}
                     for cut in (slice(0, 6), slice(6, 30)))
    state = layer.init_state(2)
    shapes = {name: {1: torch.export.Dim("tokens", min=3)} for name in first}
    shapes["state"] = [None] * len(torch.utils._pytree.tree_leaves(state))
    with torch.no_grad():
        program = torch.export.export(layer, (), {**first, "state": state.clone()}, dynamic_shapes=shapes, strict=False)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        run = torch._inductor.aoti_load_package(package)
        parts = [run(**first, state=state), run(**second, state=state)]
    assert close(torch.cat(parts, 1), layer(**x))
