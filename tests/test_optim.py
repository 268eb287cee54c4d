"""engram.optim: against torch.optim and a dense oracle on the touched rows, accumulation, resuming, what is refused."""
import copy
import io
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from engram import nn as enn
from engram import ops
from engram.optim import SGD, LazyAdamW, RowWiseAdagrad, RowWiseAdam, clip_grad_norm_, param_groups
from samples import DEVICES, DTYPES, relative_error
from torch.utils.checkpoint import checkpoint

OPTIMIZERS = {
    "sgd": lambda params, **k: SGD(params, **dict(lr=0.1) | k),
    "momentum": lambda params, **k: SGD(params, **dict(lr=0.1, momentum=0.9) | k),
    "adagrad": lambda params, **k: RowWiseAdagrad(params, **dict(lr=0.1) | k),
    "adam_rows": lambda params, **k: RowWiseAdam(params, **dict(lr=0.1) | k),
    "adam_rows_alone": lambda params, **k: RowWiseAdam(params, **dict(lr=0.1, momentum=False) | k),
    "lazy_adamw": lambda params, **k: LazyAdamW(params, **dict(lr=0.1) | k),
}
EACH = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
ROWS, WIDTH = 30, 12


def table(dtype=torch.float32, device="cpu", seed=0) -> torch.nn.Parameter:
    values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.Parameter(values.to(dtype).to(device))


def batch(step: int, tokens=9, high=ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(high, (tokens, 4), generator=draw)
    return rows, torch.randn(tokens, 4, WIDTH, generator=draw)


def train(weight, optimizer, steps, sparse=True, begin=0, **size) -> torch.Tensor:
    for step in range(begin, begin + steps):
        rows, grad = (x.to(weight.device) for x in batch(step, **size))
        optimizer.zero_grad()
        ops.embedding(weight, rows, sparse_grad=sparse).backward(grad.to(weight.dtype))
        optimizer.step()
    return weight.detach()


def dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad


class Oracle:
    """The definitions, dense and in float64, restricted to the touched rows by selection."""

    def __init__(self, weight: torch.Tensor, name: str, lr=0.1, weight_decay=0.0, maximize=False):
        self.w, self.name, self.step = weight.detach().double().clone(), name, 0
        self.lr, self.weight_decay, self.sign = lr, weight_decay, -1 if maximize else 1
        self.m, self.v = torch.zeros_like(self.w), torch.zeros_like(self.w)

    def update(self, g: torch.Tensor, touched: torch.Tensor) -> None:
        g, self.step = self.sign * g.double(), self.step + 1
        rows = touched[:, None]
        w = self.w * (1 - self.lr * self.weight_decay)
        squares = g.square() if self.name == "lazy_adamw" else g.square().mean(1, keepdim=True).expand_as(g)
        m, v = g, self.v
        if self.name == "momentum":
            m = 0.9 * self.m + g
            change = m
        elif self.name == "adagrad":
            v = self.v + squares
            change = g / (v.sqrt() + 1e-10)
        elif self.name == "sgd":
            change = g
        else:
            v = 0.999 * self.v + 0.001 * squares
            m = g if self.name == "adam_rows_alone" else 0.9 * self.m + 0.1 * g
            correction = 1 if self.name == "adam_rows_alone" else 1 - 0.9**self.step
            change = m / correction / ((v / (1 - 0.999**self.step)).sqrt() + 1e-8)
        self.w = torch.where(rows, w - self.lr * change, self.w)
        self.m, self.v = torch.where(rows, m, self.m), torch.where(rows, v, self.v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, dict(weight_decay=0.3), dict(maximize=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_definitions(name, dtype, options, device):
    weight = table(dtype, device)
    decay = dict(weight_decay=0.0) | options
    optimizer, oracle = OPTIMIZERS[name]([weight], **decay), Oracle(weight, name, **decay)
    for step in range(12):
        rows, grad = (x.to(device) for x in batch(step, tokens=3))
        optimizer.zero_grad()
        ops.embedding(weight, rows, sparse_grad=True).backward(grad.to(dtype))
        touched = torch.zeros(ROWS, dtype=torch.bool, device=device).index_fill_(0, rows.flatten(), True)
        oracle.update(dense(weight.grad), touched)
        optimizer.step()
    error = (weight.detach().double() - oracle.w).norm() / oracle.w.norm()
    assert error < (1e-12 if dtype == torch.float64 else 1e-5)
    assert not touched.all()


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("ours, theirs", [
    (lambda p: SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (lambda p: SGD(p, 0.1, momentum=0.8), lambda p: torch.optim.SGD(p, 0.1, momentum=0.8)),
    (lambda p: LazyAdamW(p, 0.1, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1)),
    (lambda p: LazyAdamW(p, 0.1, weight_decay=0, maximize=True), lambda p: torch.optim.Adam(p, 0.1, maximize=True)),
], ids=["sgd", "momentum", "adamw", "adam"])
def test_torchs_own_where_every_row_is_touched(ours, theirs, sparse):
    weights = [table(torch.float64) for _ in range(2)]
    for weight, make in zip(weights, (ours, theirs)):
        optimizer = make([weight])
        for step in range(5):
            grad = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            weight.grad = grad.to_sparse(1) if sparse and make is ours else grad
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-14)


def test_sparse_adam_where_it_is_exact():
    """torch.optim.SparseAdam is lazy in the same way, element by element; its eps comes before the bias correction."""
    weights = [table(torch.float64) for _ in range(2)]
    for weight, optimizer in zip(weights, (LazyAdamW([weights[0]], 0.1, weight_decay=0, eps=1e-15),
                                           torch.optim.SparseAdam([weights[1]], 0.1, eps=1e-15))):
        train(weight, optimizer, 8, tokens=3)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-9, atol=1e-12)


@EACH
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_kind_of_gradient(make, dtype):
    """Ours, torch's uncoalesced one, its coalesced one, and a dense one whose rows are all touched: the same step.

    To the bit, but for sums that torch itself rounds."""
    results = {}
    rows, grad = torch.arange(ROWS).repeat(2).view(-1, 1), torch.randn(2 * ROWS, 1, WIDTH).to(dtype)
    for kind in ("ours", "uncoalesced", "coalesced", "dense"):
        weight = table(dtype)
        optimizer = make([weight])
        if kind == "uncoalesced":
            F.embedding(rows, weight, sparse=True).backward(grad)
            assert not weight.grad.is_coalesced()
        else:
            ops.embedding(weight, rows, sparse_grad=kind != "dense").backward(grad)
            weight.grad = weight.grad.coalesce() if kind == "coalesced" else weight.grad
        optimizer.step()
        results[kind] = weight.detach()
    assert torch.equal(results["ours"], results["coalesced"]) and torch.equal(results["ours"], results["dense"])
    error = relative_error(results["uncoalesced"], results["ours"])
    assert error == 0 if dtype.itemsize > 2 else error < 2**-7         # its sums are never rounded to the dtype


@EACH
def test_step_plan(make):
    """Straight from the looked up rows' gradient: to the bit as through a float32 sparse gradient."""
    weights = [table(), table()]
    optimizers = [make([weight]) for weight in weights]
    for step in range(5):
        rows, grad = batch(step)
        optimizers[0].zero_grad()
        ops.embedding(weights[0], rows, sparse_grad=True).backward(grad)
        optimizers[0].step()
        out = ops.embedding(weights[1].detach(), rows).requires_grad_()
        (out * grad).sum().backward()
        optimizers[1].step_plan(weights[1], ops.row_plan(rows, ROWS), out.grad)
    assert torch.equal(*weights)
    with pytest.raises(ValueError, match="param must be one of this optimizer's parameters"):
        optimizers[0].step_plan(weights[1], ops.row_plan(rows, ROWS), grad)


# Accumulation. ------------------------------------------------------------------------------------------------------

def one_batch(make, backward) -> torch.Tensor:
    weight = table()
    optimizer = make([weight])
    backward(weight)
    optimizer.step()
    return weight.detach()


@EACH
def test_accumulation(make):
    """Several backwards, two losses, one table twice in a graph, a recomputation: as one big batch."""
    parts = [batch(step) for step in range(3)]
    rows, grad = (torch.cat(x) for x in zip(*parts))

    def lookup(weight, rows):
        return ops.embedding(weight, rows, sparse_grad=True)

    def several(weight):
        for rows, grad in parts:
            lookup(weight, rows).backward(grad)

    def losses(weight):
        sum((lookup(weight, rows) * grad).sum() for rows, grad in parts).backward()

    def recomputed(use_reentrant):
        def backward(weight):
            scale = torch.ones((), requires_grad=True)          # reentrant checkpoints want a differentiable input
            for rows, grad in parts:
                out = checkpoint(lambda s, r=rows: s * lookup(weight, r), scale, use_reentrant=use_reentrant)
                out.backward(grad)
        return backward

    def shared_plan(weight):
        plan = ops.row_plan(rows, ROWS)
        for half in (0.25, 0.75):
            (ops.embedding(weight, rows, sparse_grad=True, plan=plan) * grad * half).sum().backward()

    big = one_batch(make, lambda weight: lookup(weight, rows).backward(grad))
    for backward in (several, losses, recomputed(True), recomputed(False), shared_plan):
        torch.testing.assert_close(one_batch(make, backward), big, rtol=1e-5, atol=1e-5)


def test_one_table_in_two_layers():
    shared = enn.MultiHeadEmbedding([7, 11], 4, sparse=True)
    assert "sparse=True" in repr(shared)
    dense_twin = copy.deepcopy(shared)
    dense_twin.sparse = False
    rows = torch.tensor([[0, 7], [6, 17], [0, 9]])
    for module in (shared, dense_twin):
        (module(rows).sum() + module(rows + 0).square().sum() + module(rows[:1]).sum()).backward()
    torch.testing.assert_close(shared.weight.grad.to_dense(), dense_twin.weight.grad)


# What a training loop does. -----------------------------------------------------------------------------------------

@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["torch.save", "safetensors", "distributed", "deepcopy"])
def test_resumes_bit_for_bit(make, dtype, way, tmp_path):
    options = dict(stochastic_rounding=True, seed=3)
    expected = table(dtype)
    optimizer = make([expected], **options)
    train(expected, optimizer, 5)
    weight = table(dtype, seed=1)
    weight.data.copy_(expected.data)
    resumed = make([weight], **options)
    saved = optimizer.state_dict()
    if way == "torch.save":
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
    elif way == "safetensors":
        from safetensors.torch import load_file, save_file
        save_file({name: value for name, value in saved["state"][0].items()}, tmp_path / "state")
        resumed.load_state_dict(dict(saved, state={0: load_file(tmp_path / "state")}))
    elif way == "distributed":
        import torch.distributed.checkpoint as dcp
        dcp.save({"optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)
        train(weight, resumed, 1)                               # state of the right shapes to load into
        weight.data.copy_(expected.data)
        loaded = {"optimizer": resumed.state_dict()}
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        resumed.load_state_dict(loaded["optimizer"])
    else:
        resumed.load_state_dict(copy.deepcopy(saved))
    for name, value in resumed.state[weight].items():
        assert torch.equal(value, optimizer.state[expected][name])
        assert value.dtype == (torch.int64 if name == "step" else torch.float32)
        assert value.data_ptr() != optimizer.state[expected][name].data_ptr()
    assert torch.equal(train(weight, resumed, 20, begin=5), train(expected, optimizer, 20, begin=5))


def test_a_wrong_state_changes_nothing():
    weight, other = table(), torch.nn.Parameter(torch.zeros(ROWS + 1, WIDTH))
    optimizer, wrong = LazyAdamW([weight]), LazyAdamW([other])
    other.grad = torch.ones_like(other)
    wrong.step()
    train(weight, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 must be \[30, 12\], got \[31, 12\]"):
        optimizer.load_state_dict(wrong.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(LazyAdamW([{"params": [other]}, {"params": [table()]}]).state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][0][name], value) for name, value in before["state"][0].items())


@EACH
def test_schedulers_closures_and_groups(make):
    weight, frozen, other = table(), table(), table(seed=2)
    optimizer = make([{"params": [weight, frozen]}, {"params": [other], "lr": 0.0}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure():
        optimizer.zero_grad()
        rows, grad = batch(0)
        loss = sum((ops.embedding(w, rows, sparse_grad=True) * grad).sum() for w in (weight, other))
        loss.backward()
        return loss

    moves = []
    for _ in range(2):
        before = weight.detach().clone()
        assert optimizer.step(closure).requires_grad
        scheduler.step()
        moves.append((weight.detach() - before).norm())
    assert 0 < moves[1] < moves[0] * 1.2
    assert torch.equal(frozen, table()) and not optimizer.state.get(frozen)
    if not isinstance(optimizer, LazyAdamW):
        assert torch.equal(other, table(seed=2))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_scaler(make, dtype):
    """A finite step is the unscaled one; an overflow leaves table and state alone."""
    weights = [table(dtype), table(dtype)]
    optimizers = [make([weight]) for weight in weights]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=10**6)
    rows, grad = batch(0)
    ops.embedding(weights[0], rows, sparse_grad=True).backward(grad.to(dtype))
    optimizers[0].step()
    scaler.scale((ops.embedding(weights[1], rows, sparse_grad=True) * grad.to(dtype)).sum()).backward()
    scaler.step(optimizers[1])
    scaler.update()
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-6)
    before, steps = weights[1].detach().clone(), optimizers[1].state[weights[1]]["step"].clone()
    optimizers[1].zero_grad()
    (ops.embedding(weights[1], rows, sparse_grad=True).float().sum() * float("inf")).backward()
    scaler.scale(torch.ones(()))
    scaler.step(optimizers[1])
    scaler.update()
    assert torch.equal(weights[1], before) and torch.equal(optimizers[1].state[weights[1]]["step"], steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_grad_norm(dtype):
    """4096 equal ids with gradients of one: the norm is 4096 sqrt(d), and not 64 sqrt(d)."""
    weight, other = table(dtype), torch.nn.Parameter(torch.zeros(3))
    F.embedding(torch.full((4096,), 5), weight, sparse=True).sum().backward()
    assert weight.grad._nnz() == 4096
    other.grad = torch.tensor([3.0, 4.0, 0.0])
    total = clip_grad_norm_([weight, other, table()], 10.0)
    assert total.item() == pytest.approx((4096**2 * WIDTH + 25) ** 0.5, rel=1e-6)
    assert weight.grad.is_coalesced() and weight.grad._nnz() == 1
    assert clip_grad_norm_([weight, other], 1e9).item() == pytest.approx(10, rel=2**-6)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clip_grad_norm_is_torchs(norm_type):
    weights = [table(torch.float64, seed=seed) for seed in range(4)]
    for weight in weights:
        weight.grad = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    for sparse, weight in zip(weights[:2], weights[2:]):
        weight.grad.copy_(sparse.grad)
        sparse.grad = sparse.grad.to_sparse(1)
    totals = [clip_grad_norm_(weights[:2], 0.7, norm_type),
              torch.nn.utils.clip_grad_norm_(weights[2:], 0.7, norm_type)]
    torch.testing.assert_close(*totals)
    for sparse, weight in zip(weights[:2], weights[2:]):
        torch.testing.assert_close(sparse.grad.to_dense(), weight.grad)
    weights[0].grad = torch.full((ROWS, WIDTH), torch.nan, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        clip_grad_norm_(weights[:2], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_([], 1.0) == 0 and clip_grad_norm_(torch.nn.Parameter(torch.zeros(2)), 1.0) == 0


def test_param_groups():
    config = dict(hidden_size=8, vocab_size=50, table_size=11, heads_per_ngram=2, embed_dim_per_head=4, layer_ids=(1,))
    from engram import EngramConfig
    layer = enn.Engram(EngramConfig(**config, sparse_grad=True), 1)
    layer.key_proj.bias.requires_grad_(False)
    rest, tables = param_groups(layer, lr=1e-3, weight_decay=0.1)
    assert tables == dict(params=[layer.embedding.weight], lr=5e-3, weight_decay=0.0)
    assert rest["lr"] == 1e-3 and rest["weight_decay"] == 0.1
    wanted = {id(p) for p in layer.parameters() if p.requires_grad} - {id(layer.embedding.weight)}
    assert {id(p) for p in rest["params"]} == wanted
    optimizer = LazyAdamW([rest, tables])
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    hidden = torch.randn(2, 6, 8)
    layer(hidden, torch.randint(50, (2, 6))).square().sum().backward()
    assert layer.embedding.weight.grad.is_sparse
    optimizer.step()
    changed = {name for name, p in layer.named_parameters() if not torch.equal(p, before[name])}
    assert {"embedding.weight", "key_proj.weight", "value_proj.bias"} <= changed and "key_proj.bias" not in changed
    assert [group["lr"] for group in param_groups(torch.nn.Linear(2, 2), 0.1, 0.0)] == [0.1]


# Numbers. -----------------------------------------------------------------------------------------------------------

def test_small_steps_in_bfloat16():
    """200 equal steps of 1e-5 on a bfloat16 table: lost by rounding to nearest, followed within 2 % at random."""
    moved = {}
    for stochastic in (False, True):
        weight = torch.nn.Parameter(torch.ones(500, 64, dtype=torch.bfloat16))
        optimizer = SGD([weight], lr=1e-5, stochastic_rounding=stochastic)
        for _ in range(200):
            optimizer.zero_grad()
            ops.embedding(weight, torch.arange(500)[:, None], sparse_grad=True).sum().backward()
            optimizer.step()
        moved[stochastic] = (1 - weight.detach().double()).mean().item()
    assert moved[False] == 0 and moved[True] == pytest.approx(200 * 1e-5, rel=0.02)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@EACH
def test_thread_count_never_shows(make, threads):
    found = []
    before = torch.get_num_threads()
    try:
        for number in (2, threads):
            torch.set_num_threads(number)
            weight = torch.nn.Parameter(torch.ones(5000, WIDTH, dtype=torch.bfloat16))
            optimizer = make([weight], stochastic_rounding=True)
            found.append(train(weight, optimizer, 3, tokens=3000, high=5000))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.slow
@EACH
def test_past_2_31_elements(make, tmp_path):
    """The last row of the table, through lookup, gradient and step; only what is touched is ever real memory."""
    width = 264
    rows = 2**31 // width + 10
    weight = torch.from_file(str(tmp_path / "table"), shared=True, size=rows * width, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(weight.view(rows, width))
    touched = torch.tensor([[0, rows - 1, rows - 1, rows // 2]])
    small = torch.nn.Parameter(torch.zeros(4, width, dtype=torch.bfloat16))
    grad = torch.randn(1, 4, width).bfloat16()
    for parameter, index in ((weight, touched), (weight, touched.int()), (small, torch.tensor([[0, 3, 3, 1]]))):
        optimizer = make([parameter])
        with torch.no_grad():
            parameter[index[0]] = 0.0
        for _ in range(2):
            optimizer.zero_grad()
            ops.embedding(parameter, index, sparse_grad=True).backward(grad)
            optimizer.step()
        if parameter is weight:
            found = parameter.detach()[touched[0]].clone()
            assert found.any() and not parameter.detach()[rows - 2].any()
    assert torch.equal(found, small.detach()[[0, 3, 3, 1]])


MEMORY = """
import resource, sys, torch
from engram import optim, ops
torch.set_num_threads(2)
rows, tokens, columns, width = 4_000_000, 4096, 16, 32
weight = torch.nn.Parameter(torch.ones(rows, width))
optimizer = getattr(optim, sys.argv[1])([weight], **eval(sys.argv[2]))
grad = torch.randn(tokens, columns, width) / 1e3
def step():
    out = ops.embedding(weight, torch.randint(rows, (tokens, columns)), sparse_grad=True)
    out.backward(grad)
    optimizer.step()
    optimizer.zero_grad()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
for _ in range(3):
    step()
print(peak() - before, sum(x.nbytes for x in optimizer.state[weight].values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, options", [("SGD", "dict(lr=0.1)"), ("RowWiseAdagrad", "dict()"),
                                           ("RowWiseAdam", "dict(momentum=False)")])
def test_memory_follows_the_batch(name, options):
    """A 512 MB table: 4 bytes a row of state, 20 MB, and what the batch needs; nothing in proportion to the table."""
    run = subprocess.run([sys.executable, "-c", MEMORY, name, options], capture_output=True, text=True, check=True)
    peak, state = map(int, run.stdout.split())
    slots = 4096 * 16
    batch = slots * (8 * 5 + 3 * 4 * 32)        # ids, keys twice, runs, rows; output, sums, a copy of them
    assert state <= (4 * 4_000_000 if name != "SGD" else 0) + 8
    assert peak <= state + batch + 20e6, f"{peak / 1e6:.0f} MB"


@pytest.mark.parametrize("tokens", [0, 5])
@EACH
def test_nothing_touched(make, tokens):
    weight = table()
    optimizer = make([weight], weight_decay=0.5)
    mask = torch.zeros(tokens, dtype=torch.bool)
    ops.embedding(weight, torch.full((tokens, 4), 10**6), sparse_grad=True, mask=mask).sum().backward()
    assert weight.grad._nnz() == 0
    optimizer.step()
    assert torch.equal(weight, table())


@EACH
def test_parameters_of_any_shape(make):
    """Vectors, scalars, more dimensions, none at all: for whole models with one optimizer."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((), (3,), (2, 3, 4), (0, 3), (2, 0))]
    optimizer = make(params)
    sum(p.square().sum() for p in params).backward()
    optimizer.step()
    assert all((p.detach() < 1).all() for p in params)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    optimizer.step()


# Refusals. ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make, message", [
    (lambda p: SGD(p, lr=-1), "SGD: lr must be at least 0, got -1"),
    (lambda p: SGD(p, lr=float("nan")), "SGD: lr must be at least 0, got nan"),
    (lambda p: SGD(p, 0.1, momentum=1.0), r"SGD: momentum must be in \[0, 1\), got 1.0"),
    (lambda p: RowWiseAdagrad(p, eps=-1e-9), "RowWiseAdagrad: eps must be at least 0, got -1e-09"),
    (lambda p: RowWiseAdam(p, betas=(0.9, 1.0)), r"RowWiseAdam: betas must be in \[0, 1\), got \(0.9, 1.0\)"),
    (lambda p: LazyAdamW(p, weight_decay=-0.1), "LazyAdamW: weight_decay must be at least 0, got -0.1"),
    (lambda p: LazyAdamW(p, seed=2**63), "LazyAdamW: seed must be an integer of 64 bits, got 9223372036854775808"),
    (lambda p: LazyAdamW(p, seed=0.5), "LazyAdamW: seed must be an integer of 64 bits, got 0.5"),
    (lambda p: LazyAdamW([]), "empty parameter list"),
])
def test_bad_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make([table()])


def test_bad_gradients():
    weight = table()
    optimizer = SGD([weight], 0.1)
    weight.grad = torch.ones(ROWS, WIDTH).to_sparse(2)
    with pytest.raises(ValueError, match="a sparse gradient must be of a matrix, by rows"):
        optimizer.step()
    strided = torch.nn.Parameter(torch.ones(4, 6).T)
    strided.grad = torch.ones(6, 4)
    with pytest.raises(ValueError, match=r"parameters must be contiguous, got strides \(1, 6\)"):
        SGD([strided], 0.1).step()
    with torch.sparse.check_sparse_tensor_invariants(False):
        weight.grad = torch.sparse_coo_tensor([[0, ROWS]], torch.ones(2, WIDTH), (ROWS, WIDTH), check_invariants=False)
    before = weight.detach().clone()
    with pytest.raises(IndexError, match=rf"rows must be in \[0, {ROWS}\)"):
        optimizer.step()
    assert torch.equal(weight, before)
