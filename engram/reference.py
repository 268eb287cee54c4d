"""The ops of engram in plain PyTorch: the specification, the oracle of the tests, the eager baseline of the benchmarks.

Every function has the name, the arguments and the semantics of its sibling in `engram.ops`, is differentiated by
autograd, and runs on any device and in any dtype: float64 keeps float64, everything else computes in float32 and rounds
once at the end. A position that is masked, or that belongs to another document, is left out by selection and never by
multiplication with zero: NaN and inf there reach neither a result nor a gradient.

Letters: B batch, T tokens, N largest n-gram, C hash columns, L layers, V vocabulary, R table rows, d row width,
G residual branches, D hidden size, K conv taps.

Sources: Engram (arXiv 2601.07372), sections 2.2 to 2.4, and the demo that the paper was published with.
"""
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def ngram_hash(
    token_ids: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    *,
    pad_id: int,
    token_map: Tensor | None = None,
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    history: Tensor | None = None,
) -> Tensor:
    """Table rows of the n-grams of orders 2..N that end at each token, for all layers at once.

        win[t, s] = map[id[t - s]], or map[pad_id] where slot s or a newer one is blocked        s = 0..N-1
        mix[n]    = win[t, 0] * multipliers[0] ^ ... ^ win[t, n-1] * multipliers[n-1]            wraps modulo 2**64
        row       = offsets[c] + mix[n] mod moduli[c]      floored modulo; columns c are order-major, then head

    A slot is blocked before the start of the sequence (or where `history` is negative), at a masked token, and across a
    change of document id; whatever is older than a blocked slot is blocked too.

    token_ids int32/int64 [B, T]; multipliers int64 [L, N]; moduli, offsets int64 [L, C] with C a multiple of N-1;
    token_map int32 [V]; document_ids integer [B, T]; mask bool [B, T], False = not a token; history integer [B, N-1],
    the raw ids before token_ids[:, 0], oldest first, of the same document. pad_id is raw and goes through the map.
    Returns int64 [L, B, T, C].

    Raises IndexError for a visible id outside [0, V) when there is a map, ValueError for a pad_id outside of it, for a
    modulus below 1, and for a wrong shape or dtype.
    """
    op = "ngram_hash"
    _check(token_ids.dim() == 2, op, "token_ids must be [B, T]", token_ids)
    batch, tokens = token_ids.shape
    _check(multipliers.dim() == 2 and multipliers.shape[1] >= 2, op, "multipliers must be [L, N], N >= 2", multipliers)
    layers, order = multipliers.shape
    _check(moduli.dim() == 2 and moduli.shape[0] == layers and moduli.shape[1] % (order - 1) == 0,
           op, f"moduli must be [{layers}, C] with C a multiple of {order - 1}", moduli)
    _check(offsets.shape == moduli.shape, op, f"offsets must be {list(moduli.shape)}", offsets)
    _check_tokenwise(op, (batch, tokens), document_ids=document_ids, mask=mask)
    if (moduli < 1).any():
        raise ValueError(f"{op}: moduli must be at least 1, got {moduli.min().item()}")

    # The sequence with the N-1 places before it; readable says which of them may be read at all.
    if history is None:
        past = token_ids.new_zeros(batch, order - 1, dtype=torch.int64)
        readable_past = torch.zeros_like(past, dtype=torch.bool)
    else:
        _check(history.shape == (batch, order - 1) and _is_integer(history), op,
               f"history must be integer [{batch}, {order - 1}]", history)
        past = history.long()
        readable_past = (past >= 0).flip(1).cumprod(1).flip(1).bool()
    visible = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask
    readable = torch.cat([readable_past, visible], 1)
    ids = torch.cat([past, token_ids.long()], 1)
    stand_in: Tensor | int = pad_id
    if token_map is not None:
        vocab_size = token_map.shape[0]
        if not 0 <= pad_id < vocab_size:
            raise ValueError(f"{op}: pad_id must be in [0, {vocab_size}), got {pad_id}")
        wrong = ids[readable & ((ids < 0) | (ids >= vocab_size))]
        if wrong.numel():
            raise IndexError(f"{op}: token_ids and history must be in [0, {vocab_size}), got {wrong[0].item()}")
        ids = token_map[torch.where(readable, ids, pad_id)].long()
        stand_in = token_map[pad_id].long()

    columns = moduli.shape[1] // (order - 1)
    blocked = torch.zeros_like(token_ids, dtype=torch.bool)
    mix = torch.zeros(layers, batch, tokens, dtype=torch.int64, device=token_ids.device)
    rows = [mix.new_empty(layers, batch, tokens, 0)]
    for s in range(order):
        slot = slice(order - 1 - s, order - 1 - s + tokens)
        blocked = blocked | ~readable[:, slot]
        if s and document_ids is not None:
            crossed = document_ids[:, 1:] != document_ids[:, :-1]       # between t and t + 1; none before the start
            blocked = blocked | F.pad(crossed, (s, 0))[:, :tokens]
        token = torch.where(blocked, stand_in, ids[:, slot])
        mix = mix ^ token * multipliers[:, s, None, None]
        if s:
            column = slice((s - 1) * columns, s * columns)
            rows.append(mix[..., None] % moduli[:, None, None, column] + offsets[:, None, None, column])
    return torch.cat(rows, -1)


def embedding(
    table: Tensor,
    rows: Tensor,
    *,
    sparse_grad: bool = False,
    row_begin: int | None = None,
    mask: Tensor | None = None,
    plan: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Row lookup: out[..., c, :] = table[rows[..., c]].

    table float [R, d]; rows int32/int64 [..., C]; mask bool [...]: False gives zeros and is not read. Returns
    [..., C, d] in the table's dtype. With `row_begin` the table is the shard [row_begin, row_begin + R) of a larger
    one; rows outside of it give zeros. The gradient of a row is summed in float32 (float64 for float64), rounded once;
    with `sparse_grad` it is a coalesced sparse tensor of the rows that were read. `plan` saves engram.ops work, and
    nothing here.

    Raises IndexError for a visible row outside [0, R) without `row_begin`, ValueError for a wrong shape or dtype.
    """
    op = "embedding"
    _check(table.dim() == 2, op, "table must be [R, d]", table)
    local, inside = _local_rows(op, table, rows, row_begin, mask)
    if sparse_grad:
        found: Tensor = _SparseLookup.apply(table, local, inside)  # type: ignore[no-untyped-call]  # torch's
        return found
    # Only a gradient needs the wider type: it is what the sum over repeated rows is kept in.
    source = table.to(_accumulate(table)) if table.requires_grad else table
    out = source.new_zeros(*rows.shape, table.shape[1])
    return out.index_put((inside,), source[local[inside]]).to(table.dtype)


def embedding_fp8(
    values: Tensor,
    scales: Tensor,
    rows: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    row_begin: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Row lookup in a float8 table: out[..., c, j] = values[rows[..., c], j] * scales[rows[..., c], j // 32].

    values float8_e4m3fn [R, d]; scales float8_e8m0fnu [R, ceil(d / 32)], powers of two: byte 0 is 2**-127, 255 NaN;
    rows, row_begin and mask as in `embedding`. Returns [..., C, d] in dtype; the product has four significant bits and
    is rounded once. No gradient.

    Raises IndexError for a visible row outside [0, R) without `row_begin`, ValueError for a wrong shape or dtype, and
    where values or scales require a gradient.
    """
    op = "embedding_fp8"
    _check(values.dim() == 2 and values.dtype == torch.float8_e4m3fn, op, "values must be float8_e4m3fn [R, d]", values)
    shape = (values.shape[0], -(-values.shape[1] // 32))
    _check(scales.shape == shape and scales.dtype == torch.float8_e8m0fnu, op,
           f"scales must be float8_e8m0fnu {list(shape)}", scales)
    _check_frozen(op, dtype, values=values, scales=scales)
    local, inside = _local_rows(op, values, rows, row_begin, mask)
    # Bytes are what torch can pick out of any tensor. In float64 the product is finite and exact.
    found = values.view(torch.uint8)[local[inside]].view(values.dtype).double()
    factor = scales.view(torch.uint8)[local[inside]].view(scales.dtype).double()
    product = found * factor.repeat_interleave(32, 1)[:, : values.shape[1]]
    out = torch.zeros(*rows.shape, values.shape[1], dtype=dtype, device=values.device)
    return out.index_put((inside,), _round_once(product, dtype))


def embedding_int8(
    values: Tensor,
    scales: Tensor,
    rows: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    row_begin: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Row lookup in an int8 table: out[..., c, j] = values[rows[..., c], j] * scales[rows[..., c]].

    values int8 [R, d]; scales float32 [R]; rows, row_begin and mask as in `embedding`. Returns [..., C, d] in dtype:
    the exact product, rounded once. No gradient.

    Raises IndexError for a visible row outside [0, R) without `row_begin`, ValueError for a wrong shape or dtype, and
    where scales require a gradient.
    """
    op = "embedding_int8"
    _check(values.dim() == 2 and values.dtype == torch.int8, op, "values must be int8 [R, d]", values)
    _check(scales.shape == values.shape[:1] and scales.dtype == torch.float32, op,
           f"scales must be float32 {[values.shape[0]]}", scales)
    _check_frozen(op, dtype, scales=scales)
    local, inside = _local_rows(op, values, rows, row_begin, mask)
    product = values[local[inside]].double() * scales[local[inside]].double()[:, None]
    out = torch.zeros(*rows.shape, values.shape[1], dtype=dtype, device=values.device)
    return out.index_put((inside,), _round_once(product, dtype))


class _SparseLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, local: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(local, inside)
        ctx.shape = table.shape
        out = table.new_zeros(*local.shape, table.shape[1])
        return out.index_put((inside,), table[local[inside]])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
        local, inside = ctx.saved_tensors
        rows, slots = local[inside].unique(return_inverse=True)
        sums = grad_out.new_zeros(len(rows), ctx.shape[1], dtype=_accumulate(grad_out))
        sums.index_add_(0, slots, grad_out[inside].to(sums.dtype))
        sums = sums.to(grad_out.dtype)
        grad = torch.sparse_coo_tensor(rows[None], sums, ctx.shape, check_invariants=True, is_coalesced=True)
        return grad, None, None


def row_plan(
    rows: Tensor, num_rows: int, *, row_begin: int | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of a lookup in order of (row, slot): (keys [slots], runs [slots + 1], count [1]), all int64.

    A key is row << bits | slot, with as many bits as the number of slots has; a slot that is skipped (masked, or in
    another shard) has row num_rows. Run i is keys[runs[i] : runs[i + 1]]; runs from [count] on is the number of slots
    that are not skipped.

    Raises IndexError for a visible row outside [0, R) without `row_begin`, ValueError for a wrong shape or dtype.
    """
    op = "row_plan"
    _check(rows.dim() >= 1 and rows.dtype in (torch.int32, torch.int64), op, "rows must be int32/int64 [..., C]", rows)
    _check_tokenwise(op, rows.shape[:-1], mask=mask)
    begin = row_begin or 0
    visible = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask[..., None].expand(rows.shape)
    local = rows.long() - begin
    inside = visible & (rows >= begin) & (local < num_rows)
    if row_begin is None and not torch.equal(inside, visible):
        raise IndexError(f"{op}: rows must be in [0, {num_rows}), got {rows[visible & ~inside][0].item()}")
    slots = rows.numel()
    local = local.masked_fill(~inside, num_rows).flatten()
    keys = (local << slots.bit_length() | torch.arange(slots, device=rows.device)).sort().values
    row = keys >> slots.bit_length()
    touched = int(inside.sum())
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = row[1:] != row[:-1]
    starts = first[:touched].nonzero()[:, 0]
    runs = keys.new_full((slots + 1,), touched)
    runs[: len(starts)] = starts
    return keys, runs, keys.new_tensor([len(starts)])


def row_sum(values: Tensor, keys: Tensor, runs: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """What belongs to the same row, summed: (rows int64 [n] ascending, sums [n, d]).

    values [..., C, d], one row for each slot of the plan (keys, runs, count) of `row_plan`. Sums are kept in float32
    (float64 for float64) and rounded once.
    """
    slots, runs = keys.numel(), runs[: int(count) + 1]
    slot = keys[: int(runs[-1])] & ((1 << slots.bit_length()) - 1)
    run = torch.repeat_interleave(runs.diff())
    sums = values.new_zeros(int(count), values.shape[-1], dtype=_accumulate(values))
    sums.index_add_(0, run, values.flatten(0, -2)[slot].to(sums.dtype))
    return keys[runs[:-1]] >> slots.bit_length(), sums.to(values.dtype)


def row_update(
    table: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    grad: Tensor,
    keys: Tensor | None,
    runs: Tensor | None,
    count: Tensor | None,
    step: Tensor,
    *,
    rule: str,
    lr: float,
    beta1: float = 0.0,
    beta2: float = 0.0,
    eps: float = 0.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
    seed: int | None = None,
) -> None:
    """One optimizer step in place, on the rows of `table` [R, d] that the plan (keys, runs, count) touches, or on all.

    rule "sgd", "adagrad" or "adam"; formulas and state: `engram.ops.row_update`. Computes in float32 (float64 for
    float64). `seed` rounds stochastically: the float32 bits plus 16 random ones, cut off after bfloat16's.
    """
    if table.numel() == 0:
        return
    wide = _accumulate(table)
    if keys is None or runs is None or count is None:
        rows, g = torch.arange(table.shape[0], device=table.device), grad.to(wide)
    else:
        rows, g = row_sum(grad.to(wide), keys, runs, count)
    g = -g if maximize else g
    w = table[rows].to(wide) * (1 - lr * weight_decay)
    change, number = g, int(step)
    if first is not None:
        change = beta1 * first[rows] + (1 - beta1 if rule == "adam" else 1) * g
        first[rows] = change
        if rule == "adam":
            change = change / (1 - beta1**number)
    if second is not None:
        squares = g.square() if second.dim() == 2 else g.square().mean(1)
        v = beta2 * second[rows] + (1 - beta2) * squares if rule == "adam" else second[rows] + squares
        second[rows] = v
        v = v / (1 - beta2**number) if rule == "adam" else v
        change = change / ((v if second.dim() == 2 else v[:, None]).sqrt() + eps)
    w = w - lr * change
    if seed is not None:
        bits = w.view(torch.int32) + _rounding_bits(seed, number, rows, w.shape[1]).to(torch.int32)
        w = torch.where(w.isnan(), w, (bits & -0x10000).view(torch.float32))
    table[rows] = w.to(table.dtype)


def _mix_bits(z: Tensor) -> Tensor:
    """A hash of 64 bits; >> of int64 repeats the sign, which is cut off."""
    z = (z ^ (z >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ (z >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return z ^ (z >> 31 & 2**33 - 1)


def _rounding_bits(seed: int, step: int, rows: Tensor, width: int) -> Tensor:
    """16 random bits [n, d] for each row and column."""
    golden, low = 0x9E3779B97F4A7C15 - 2**64, 2**32 - 1
    run = _mix_bits(rows.new_tensor(seed) + golden * rows.new_tensor(step))
    key = _mix_bits(run + golden * (rows + 1))[:, None]
    x = torch.arange(width, device=rows.device) * 0x9E3779B9 + (key & low) & low
    x = (x ^ x >> 16) * 0x7FEB352D & low
    x = (x ^ x >> 15) * 0x846CA68B + (key >> 32 & low) & low
    x = (x ^ x >> 16) * 0x7FEB352D & low
    return x >> 16


def gate(
    hidden: Tensor,
    key: Tensor,
    value: Tensor,
    hidden_weight: Tensor | None,
    key_weight: Tensor | None,
    *,
    eps: float,
    clamp: float = 1e-6,
    zero_rule: str = "sign",
    mask: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """The context gate: what was looked up, weighted by how well it fits the hidden state.

        s     = <rms(hidden) * hidden_weight, rms(key) * key_weight> / sqrt(D)      rms(x) = x / sqrt(mean(x**2) + eps)
        u     = sign(s) * sqrt(max(|s|, clamp))
        out   = sigmoid(u) * value  (+ hidden with `residual`)

    hidden, key [..., G, D]; value [..., D]; weights [G, D] of any float dtype, or None where that input is already
    normalised; mask bool [...]: False gives zero (`hidden`, bit for bit, with `residual`). All three inputs share a
    dtype, or hidden is float32 beside bfloat16 or float16 key and value. Returns [..., G, D] in hidden's dtype.
    zero_rule: "sign" (s = 0 gives u = 0) or "copysign" (+0 and -0 give +-sqrt(clamp)). No gradient where |s| < clamp.

    Raises ValueError for a wrong shape, dtype or zero_rule.
    """
    op = "gate"
    _check(hidden.dim() >= 2, op, "hidden must be [..., G, D]", hidden)
    _check(key.shape == hidden.shape, op, f"key must have hidden's shape {list(hidden.shape)}", key)
    value_shape = hidden.shape[:-2] + hidden.shape[-1:]
    _check(value.shape == value_shape, op, f"value must be {list(value_shape)}", value)
    _check_gate_dtypes(op, hidden, key, value)
    _check_weight(op, "hidden_weight", hidden_weight, hidden.shape[-2:])
    _check_weight(op, "key_weight", key_weight, hidden.shape[-2:])
    _check_tokenwise(op, hidden.shape[:-2], mask=mask)
    if not clamp > 0:
        raise ValueError(f"{op}: clamp must be above 0, got {clamp}")
    if zero_rule not in ("sign", "copysign"):
        raise ValueError(f"{op}: zero_rule must be 'sign' or 'copysign', got {zero_rule!r}")

    dtype = _accumulate(hidden)
    here = None if mask is None else mask[..., None, None]
    x, k = _select(here, hidden.to(dtype), 1), _select(here, key.to(dtype), 1)
    v = _select(here, value[..., None, :].to(dtype), 0)
    score = (_rms(x, hidden_weight, eps) * _rms(k, key_weight, eps)).sum(-1, keepdim=True) / hidden.shape[-1] ** 0.5
    size = score.abs()
    root = torch.where(size < clamp, clamp, size).sqrt()  # not clamp_min: its gradient at clamp differs between torches
    u = torch.copysign(root, score) if zero_rule == "copysign" else score.sign() * root
    out = torch.sigmoid(u) * v
    if residual:
        out = out + x
    return _select(here, out.to(hidden.dtype), hidden if residual else 0)


def short_conv(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    *,
    dilation: int,
    eps: float = 1e-5,
    activation: str | None = "silu",
    residual: bool = True,
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    state: None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Causal dilated depthwise convolution over the tokens, with the norm before and the activation after it.

        n[t] = rms(x[t]) * norm_weight                               rms(x) = x / sqrt(mean(x**2) + eps)
        z[t] = sum_j weight[..., j] * n[t - (K-1-j) * dilation]      tap K-1 is the current token
        y[t] = activation(z[t])  (+ x[t] with `residual`)

    A tap counts only where it is inside the sequence, not masked, and no change of document id lies between it and t.

    x [B, T, G, D]; weight [G, D, K] and norm_weight [G, D] of any float dtype (no norm_weight: no norm); document_ids
    integer [B, T]; mask bool [B, T]: False gives zero (`x`, bit for bit, with `residual`); lengths integer [B]: tokens
    past it count as masked. Returns [B, T, G, D] in x's dtype.

    Raises ValueError for a wrong shape, dtype, dilation or activation, NotImplementedError for a state.
    """
    op = "short_conv"
    if state is not None:
        raise NotImplementedError(f"{op}: the reference has no state: it is one call over everything")
    _check(x.dim() == 4, op, "x must be [B, T, G, D]", x)
    batch, tokens, branches, width = x.shape
    _check(weight.dim() == 3 and weight.shape[:2] == (branches, width) and weight.shape[2] >= 1, op,
           f"weight must be [{branches}, {width}, K]", weight)
    _check_weight(op, "norm_weight", norm_weight, (branches, width))
    _check_tokenwise(op, (batch, tokens), document_ids=document_ids, mask=mask)
    if dilation < 1:
        raise ValueError(f"{op}: dilation must be at least 1, got {dilation}")
    if activation not in ("silu", None):
        raise ValueError(f"{op}: activation must be 'silu' or None, got {activation!r}")

    mask = _within_lengths(op, (batch, tokens), lengths, mask)
    # Numbers the runs of equal document ids, so that A B A is three of them; -1 is no run: masked, or before the start.
    run = None
    if mask is not None or document_ids is not None:
        run = torch.zeros(batch, tokens, dtype=torch.int64, device=x.device)
        if document_ids is not None:
            run[:, 1:] = (document_ids[:, 1:] != document_ids[:, :-1]).cumsum(1)
        run = _select(mask, run, -1)

    here = None if mask is None else mask[..., None, None]
    source = _select(here, x.to(_accumulate(x)), 1)
    normed = _rms(source, norm_weight, eps)
    z = torch.zeros_like(source)
    for j, tap in enumerate(weight.to(source.dtype).unbind(-1)):
        shift = min((weight.shape[2] - 1 - j) * dilation, tokens)
        reached = None
        if run is not None:
            reached = ((run >= 0) & (F.pad(run, (shift, 0), value=-1)[:, :tokens] == run))[..., None, None]
        z = z + tap * _select(reached, F.pad(normed, (0, 0, 0, 0, shift, 0))[:, :tokens], 0)
    out = F.silu(z) if activation == "silu" else z
    if residual:
        out = out + source
    return _select(here, out.to(x.dtype), x if residual else 0)


def gate_conv(
    hidden: Tensor,
    key: Tensor,
    value: Tensor,
    hidden_weight: Tensor | None,
    key_weight: Tensor | None,
    conv_weight: Tensor,
    conv_norm_weight: Tensor | None,
    *,
    eps: float,
    conv_eps: float = 1e-5,
    dilation: int,
    clamp: float = 1e-6,
    zero_rule: str = "sign",
    activation: str | None = "silu",
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    residual: bool = False,
    state: None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """short_conv(gate(...)), rounded once at the end.

        x = gate(hidden, key, value, hidden_weight, key_weight)          not rounded to hidden's dtype
        y = x + activation(causal depthwise convolution of rms(x) * conv_norm_weight)      (+ hidden with `residual`)

    Shapes, dtypes, masks and documents as in `gate`, with [B, T] before [G, D], and `short_conv`. A masked position
    gives zero (`hidden`, bit for bit, with `residual`). Returns [B, T, G, D] in hidden's dtype.

    Raises what `gate` and `short_conv` raise.
    """
    op = "gate_conv"
    if state is not None:
        raise NotImplementedError(f"{op}: the reference has no state: it is one call over everything")
    _check(hidden.dim() == 4, op, "hidden must be [B, T, G, D]", hidden)
    _check_gate_dtypes(op, hidden, key, value)
    mask = _within_lengths(op, hidden.shape[:2], lengths, mask)
    wide, k, v = (x.to(_accumulate(hidden)) for x in (hidden, key, value))
    gated = gate(wide, k, v, hidden_weight, key_weight, eps=eps, clamp=clamp, zero_rule=zero_rule, mask=mask)
    out = short_conv(gated, conv_weight, conv_norm_weight, dilation=dilation, eps=conv_eps, activation=activation,
                     document_ids=document_ids, mask=mask)
    if not residual:
        return out.to(hidden.dtype)
    here = None if mask is None else mask[..., None, None]
    return _select(here, (out + wide).to(hidden.dtype), hidden)


def decode(
    hidden: Tensor,
    token_ids: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    table: Tensor,
    key_proj: Tensor,
    key_bias: Tensor | None,
    value_proj: Tensor,
    value_bias: Tensor | None,
    hidden_weight: Tensor | None,
    key_weight: Tensor | None,
    conv_weight: Tensor,
    conv_norm_weight: Tensor | None,
    history: list[Tensor],
    conv: list[Tensor],
    *,
    pad_id: int,
    max_rollback: int,
    eps: float,
    conv_eps: float,
    dilation: int,
    zero_rule: str = "sign",
    eos_id: int | None = None,
    mask_blocks_hash: bool = True,
    conv_reset: bool = True,
    token_map: Tensor | None = None,
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """The next tokens of every sequence through a whole layer, and their sequences' state moved on, in place.

        rows   = ngram_hash of the ids, which go on from those in `history`
        memory = embedding(table, rows), zeros at masked tokens, [B, T, C * d]
        key, value = memory @ proj.T + bias, rounded to the table's dtype
        out    = gate_conv(hidden, key, value, ...) after the positions that are in `conv`

    A state is a ring for each: position [B] and room [B] int64, visible bool, runs and documents int64 [B, slots], then
    ids int64 [B, slots], or value [B, slots, D] and stats [B, slots, 3 G + 1] (score and both reciprocal norms of every
    branch, the mean square of value). Position p lies in slot p % slots. A run is a stretch of one document, counted on;
    a change of document id begins one, and so does the token after a visible `eos_id`. The first lengths[b] tokens are
    appended.

    Shapes, dtypes and errors: `engram.ops.decode`, `ngram_hash`, `embedding` and `gate_conv`.
    """
    batch, tokens, branches, width = hidden.shape
    order, reach = multipliers.shape[1], (conv_weight.shape[2] - 1) * dilation
    counted = [tokens] * batch if lengths is None else lengths.clamp(0, tokens).tolist()
    visible = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask
    visible = visible & (torch.arange(tokens, device=hidden.device) < torch.tensor(counted, device=hidden.device)[:, None])
    hashed = visible if mask_blocks_hash else torch.ones_like(visible)
    ids = torch.where(hashed, token_ids.long(), pad_id)
    for b, length in enumerate(counted):
        ids[b, length:] = pad_id
    ends = hashed & (ids == eos_id) if eos_id is not None else torch.zeros_like(hashed)

    runs, documents = _continue_runs(history, document_ids, ends, history[5] == eos_id if eos_id is not None else None)
    (past_ids,), past_visible, past_runs = _last_positions(history, order - 1)
    same = past_visible & (past_runs == runs[:, :1]) if tokens else past_visible
    rows = ngram_hash(ids, multipliers, moduli, offsets, pad_id=pad_id, token_map=token_map, document_ids=runs,
                      mask=hashed, history=torch.where(same, past_ids, -1))[0]

    memory = embedding(table, rows, mask=visible).flatten(2).to(_accumulate(hidden))
    key, value = (
        F.linear(memory, weight.to(memory.dtype), None if bias is None else bias.to(memory.dtype)).to(table.dtype)
        for weight, bias in ((key_proj, key_bias), (value_proj, value_bias))
    )
    key = key.view(hidden.shape)

    marked = conv_reset and (document_ids is not None or eos_id is not None)
    conv_runs, conv_documents = _continue_runs(conv, runs if marked else None, torch.zeros_like(visible), None)
    (past_value, past_stats), past_visible, past_runs = _last_positions(conv, reach)
    wide, k, v = (x.to(memory.dtype) for x in (hidden, key, value))
    options: dict[str, Any] = dict(eps=eps, zero_rule=zero_rule)
    gated = gate(wide, k, v, hidden_weight, key_weight, mask=visible, **options)
    # A gate whose score is known: one channel, already normalised.
    score = past_stats[..., : 3 * branches : 3, None]
    past = gate(score, torch.ones_like(score), torch.ones_like(score[..., 0, :]), None, None, **options)
    past = past * past_value[:, :, None].to(memory.dtype)
    out = short_conv(torch.cat([past, gated], 1), conv_weight, conv_norm_weight, dilation=dilation, eps=conv_eps,
                     document_ids=torch.cat([past_runs, conv_runs], 1), mask=torch.cat([past_visible, visible], 1))
    out = out[:, reach:]
    if residual:
        out = out + wide
    out = _select(visible[..., None, None], out.to(hidden.dtype), hidden if residual else 0)

    w = [1 if weight is None else weight.to(memory.dtype) for weight in (hidden_weight, key_weight)]
    norms = [torch.rsqrt(x.square().mean(-1) + eps) if weight is not None else torch.ones_like(x[..., 0])
             for x, weight in ((wide, hidden_weight), (k, key_weight))]
    score = (wide * k * w[0] * w[1]).sum(-1) * norms[0] * norms[1] / width**0.5
    stats = torch.cat([torch.stack([score, *norms], -1).flatten(2), v.square().mean(-1, keepdim=True)], 2)
    stats = _select(visible[..., None], stats, 0)
    _append(history, counted, max_rollback, hashed, runs, documents, ids)
    _append(conv, counted, max_rollback, visible, conv_runs, conv_documents, value, stats)
    return out


def _continue_runs(
    ring: list[Tensor], document_ids: Tensor | None, ends: Tensor, past_ends: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run and document of every token, int64 [B, T] each, counted on from the last position in the ring."""
    position, _, visible, runs, documents = ring[:5]
    new_runs, new_documents = (torch.empty_like(ends, dtype=torch.int64) for _ in range(2))
    for b in range(ends.shape[0]):
        end = int(position[b])
        last = (end - 1) % runs.shape[1]
        run, document = int(runs[b, last]), int(documents[b, last])
        starts = end > 0 and past_ends is not None and bool(past_ends[b, last] & visible[b, last])
        for t in range(ends.shape[1]):
            here = document if document_ids is None else int(document_ids[b, t])
            run += starts or (here != document and end + t > 0)
            document, starts = here, bool(ends[b, t])
            new_runs[b, t], new_documents[b, t] = run, document
    return new_runs, new_documents


def _last_positions(ring: list[Tensor], reach: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Payload, visible and runs of the `reach` positions before the next token, oldest first."""
    position, _, visible, runs, _, *payload = ring
    at = position[:, None] + torch.arange(-reach, 0, device=position.device)
    slots, row = at % runs.shape[1], torch.arange(len(position), device=position.device)[:, None]
    return [x[row, slots] for x in payload], visible[row, slots] & (at >= 0), runs[row, slots]


def _append(
    ring: list[Tensor], counted: list[int], max_rollback: int, visible: Tensor, runs: Tensor, documents: Tensor,
    *payload: Tensor,
) -> None:
    position, room, *slots = ring
    for b, length in enumerate(counted):
        for t in range(length):
            slot = (int(position[b]) + t) % slots[0].shape[1]
            for to, x in zip(slots, (visible, runs, documents, *payload)):
                to[b, slot] = x[b, t]
        position[b] += length
        room[b] = min(int(room[b]) + length, max_rollback)


def _accumulate(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to dtype. torch goes to half types by way of float32, which rounds twice unless the float32 number shows
    that there was more: of the two around x the one that is odd in its last bit."""
    near = x.float()
    if dtype in (torch.bfloat16, torch.float16):
        bits = near.view(torch.int32)
        bits = bits - (near.double().abs() > x.abs()).int()     # now the one nearer to zero
        inexact = near.double() != x
        near = torch.where(x.isfinite() & inexact, bits | 1, near.view(torch.int32)).view(torch.float32)
    return x if dtype == torch.float64 else near.to(dtype)


def _rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _select(condition: Tensor | None, x: Tensor, other: Tensor | int) -> Tensor:
    return x if condition is None else torch.where(condition, x, other)


def _within_lengths(op: str, shape: tuple[int, ...], lengths: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """`mask`, False from `lengths[b]` on."""
    if lengths is None:
        return mask
    batch, tokens = shape
    _check(lengths.shape == (batch,) and _is_integer(lengths), op, f"lengths must be integer [{batch}]", lengths)
    counted = torch.arange(tokens, device=lengths.device) < lengths[:, None]
    return counted if mask is None else mask & counted


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _check(condition: bool, op: str, expected: str, got: Tensor) -> None:
    if not condition:
        raise ValueError(f"{op}: {expected}, got {got.dtype} {list(got.shape)}")


def _local_rows(
    op: str, table: Tensor, rows: Tensor, row_begin: int | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows within the table, and which of them are to be read."""
    _check(rows.dim() >= 1 and rows.dtype in (torch.int32, torch.int64), op, "rows must be int32/int64 [..., C]", rows)
    _check_tokenwise(op, rows.shape[:-1], mask=mask)
    if row_begin is not None and row_begin < 0:
        raise ValueError(f"{op}: row_begin must be at least 0, got {row_begin}")
    visible = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask[..., None].expand(rows.shape)
    begin = row_begin or 0
    local = rows.long() - begin
    inside = visible & (rows >= begin) & (local < table.shape[0])
    if row_begin is None and not torch.equal(inside, visible):
        wrong = rows[visible & ~inside][0].item()
        raise IndexError(f"{op}: rows must be in [0, {table.shape[0]}), got {wrong}")
    return local, inside


def _check_frozen(op: str, dtype: torch.dtype, **tensors: Tensor) -> None:
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{op}: dtype must be float64, float32, bfloat16 or float16, got {dtype}")
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(f"{op}: {name} must not require a gradient, got requires_grad=True")


def _check_gate_dtypes(op: str, hidden: Tensor, key: Tensor, value: Tensor) -> None:
    _check(key.dtype == value.dtype, op, f"value must have key's dtype {key.dtype}", value)
    mixed = hidden.dtype == torch.float32 and key.dtype in (torch.bfloat16, torch.float16)
    _check(mixed or hidden.dtype == key.dtype, op, f"key must have hidden's dtype {hidden.dtype} or a half one", key)


def _check_weight(op: str, name: str, weight: Tensor | None, shape: tuple[int, ...]) -> None:
    if weight is not None:
        fits = weight.shape == tuple(shape) and weight.is_floating_point()
        _check(fits, op, f"{name} must be float {list(shape)}", weight)


def _check_tokenwise(
    op: str, shape: tuple[int, ...], *, mask: Tensor | None = None, document_ids: Tensor | None = None
) -> None:
    if mask is not None:
        _check(mask.shape == tuple(shape) and mask.dtype == torch.bool, op, f"mask must be bool {list(shape)}", mask)
    if document_ids is not None:
        _check(document_ids.shape == tuple(shape) and _is_integer(document_ids), op,
               f"document_ids must be integer {list(shape)}", document_ids)
