"""`engram check`: every operator, forward and backward, against `engram.reference` in float64.

The inputs are small, drawn with a fixed seed, and rounded to the dtype under test before the reference sees them: what
is measured is the kernels' own error. It is relative and norm-wise, the worst of all outputs or gradients.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

import engram
from engram import ops, reference
from engram.cli.errors import UsageError

NO_GRADIENT = ("decode", "ngram_hash", "embedding_fp8", "embedding_int8", "row_plan", "row_sum", "row_update")
EXACT = ("embedding_fp8", "embedding_int8")  # their one rounding is the reference's, whatever the dtype of the result
IN_PLACE = {"row_update": ("table", "first", "second")}  # what an operator writes, where it returns nothing

TOLERANCES = {  # forward, gradients; one rounding of an output is 6e-8, 4e-3, 5e-4 at most
    torch.float64: (1e-12, 1e-11),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (8e-3, 8e-3),
    torch.float16: (1e-3, 1e-3),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `engram check`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="check this device only (default: all there are)")


def devices(wanted: str | None = None) -> list[str]:
    """The devices engram's operators run on here. Raises UsageError where `wanted` is none of them."""
    kernels, gpu = bool(engram.build_info()["cuda"]), torch.cuda.is_available()
    found = ["cpu"] + (["cuda"] if kernels and gpu else [])
    if wanted is None:
        return found
    if wanted not in found:
        why = "this build of engram has no CUDA kernels" if not kernels else "torch sees no GPU"
        raise UsageError(f"device {wanted} cannot be used: {why}")
    return [wanted]


def inputs(op: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`(tensors, constants)` of an operator: float64 tensors to round and differentiate, and all other arguments."""
    draw = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=draw)

    B, T, G, D, K, V = 2, 19, 2, 24, 4, 50
    documents = torch.tensor([[0] * 7 + [1] * (T - 7), [0] * T])
    mask = torch.arange(T) < torch.tensor([[T], [T - 4]])
    if op == "ngram_hash":
        moduli = torch.tensor([[11, 13, 17, 19], [23, 29, 31, 37]])
        return {}, dict(
            token_ids=integers(V, B, T),
            multipliers=2 * integers(2**62, 2, 3) + 1,
            moduli=moduli,
            offsets=moduli.cumsum(1) - moduli,
            pad_id=2,
            token_map=(torch.arange(V) * 7 % 40).to(torch.int32),
            document_ids=documents,
            mask=mask,
            history=torch.tensor([[3, 4], [-1, 5]]),
        )
    if op == "embedding":
        return dict(table=floats(60, D)), dict(rows=integers(60, B, T, 4), mask=mask)
    if op == "embedding_fp8":
        values, scales = integers(256, 60, 75) & 0xF7, 100 + integers(34, 60, 3)  # no NaN, nothing past float16
        values = values.to(torch.uint8).view(torch.float8_e4m3fn)
        scales = scales.to(torch.uint8).view(torch.float8_e8m0fnu)
        return {}, dict(values=values, scales=scales, rows=integers(60, B, T, 4), mask=mask)
    if op == "embedding_int8":
        values = integers(256, 60, 75).to(torch.uint8).view(torch.int8)
        return {}, dict(values=values, scales=floats(60).float(), rows=integers(60, B, T, 4), mask=mask)
    gate = dict(
        hidden=floats(B, T, G, D), key=floats(B, T, G, D), value=floats(B, T, D),
        hidden_weight=1 + floats(G, D) / 4, key_weight=1 + floats(G, D) / 4,
    )
    if op == "gate":
        return gate, dict(eps=1e-6, mask=mask, residual=True)
    if op == "short_conv":
        tensors = dict(x=floats(B, T, G, D), weight=floats(G, D, K) / 2, norm_weight=1 + floats(G, D) / 4)
        return tensors, dict(dilation=3, document_ids=documents, mask=mask)
    if op == "gate_conv":
        conv = dict(conv_weight=floats(G, D, K) / 2, conv_norm_weight=1 + floats(G, D) / 4)
        return gate | conv, dict(eps=1e-6, dilation=3, document_ids=documents, mask=mask, residual=True)
    if op == "decode":
        del gate["key"], gate["value"]
        moduli = torch.tensor([[11, 13, 17, 19]])
        weights = dict(
            table=floats(60, D), key_proj=floats(G * D, 4 * D) / D, key_bias=floats(G * D), value_proj=floats(D, 4 * D) / D,
            value_bias=floats(D), conv_weight=floats(G, D, K) / 2, conv_norm_weight=1 + floats(G, D) / 4,
        )
        hashing = dict(token_ids=integers(V, B, T), multipliers=2 * integers(2**62, 1, 3) + 1, moduli=moduli,
                       offsets=moduli.cumsum(1) - moduli, pad_id=2, document_ids=documents, mask=mask)
        return gate | weights, hashing | dict(eps=1e-6, conv_eps=1e-5, dilation=3, max_rollback=0, residual=True)
    lookup: dict[str, Any] = dict(rows=integers(60, B, T, 4), mask=mask)
    if op == "row_plan":
        return {}, lookup | dict(num_rows=60)
    plan = dict(zip(("keys", "runs", "count"), reference.row_plan(**lookup, num_rows=60)))
    if op == "row_sum":
        return dict(values=floats(B, T, 4, D)), plan
    if op == "row_update":
        factors = dict(rule="adam", lr=0.1, beta1=0.5, beta2=0.5, eps=1e-3, weight_decay=0.1)
        # States are drawn here but kept in the accumulation type: see `measure`.
        tensors = dict(table=floats(60, D), first=floats(60, D), second=floats(60, D).square(), grad=floats(B, T, 4, D))
        return tensors, plan | factors | dict(step=torch.tensor([3]))
    raise NotImplementedError(f"engram check has no inputs for {op}")


def measure(op: str, device: str, dtype: torch.dtype) -> tuple[float, float | None]:
    """Errors `(forward, gradients)` of one operator: None without gradients, the share of wrong ones for integers."""
    tensors, constants = inputs(op)
    if op in EXACT:
        constants |= dict(dtype=dtype)
    rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if op in IN_PLACE and dtype != torch.float64:
        rounded |= {name: tensors[name].float() for name in ("first", "second")}
    results: list[tuple[list[Tensor], list[Tensor]]] = []  # outputs and gradients, of ours, then of the reference
    grad_output = None
    for module, place, exact in ((ops, device, False), (reference, "cpu", True)):
        leaves = {name: x.to(place, torch.float64 if exact else x.dtype, copy=True) for name, x in rounded.items()}
        others = {name: v.to(place) if isinstance(v, torch.Tensor) else v for name, v in constants.items()}
        if op == "decode":
            others |= _fresh_state(leaves, others["token_ids"])
        if op in NO_GRADIENT:
            output = getattr(module, op)(**leaves, **others)
            outputs = [leaves[name] for name in IN_PLACE[op]] if op in IN_PLACE else output
            results.append(([x.cpu() for x in (outputs if isinstance(outputs, (list, tuple)) else [outputs])], []))
            continue
        for leaf in leaves.values():
            leaf.requires_grad_()
        output = getattr(module, op)(**leaves, **others)
        if grad_output is None:
            draw = torch.Generator().manual_seed(1)
            grad_output = torch.randn(output.shape, generator=draw, dtype=torch.float64).to(dtype)
        found = torch.autograd.grad(output, list(leaves.values()), grad_output.to(place, output.dtype))
        results.append(([output.detach().cpu()], [g.cpu().double() for g in found]))
    (outputs, gradients), (expected, expected_gradients) = results
    return (max(map(relative, outputs, expected)),
            None if op in NO_GRADIENT else max(map(relative, gradients, expected_gradients)))


def _fresh_state(leaves: dict[str, Tensor], like: Tensor) -> dict[str, list[Tensor]]:
    """`history` and `conv` of `ops.decode`, nothing appended yet: trigrams, and nine positions for the taps."""
    B, D, G = like.shape[0], *reversed(leaves["conv_norm_weight"].shape)
    wide = torch.float64 if leaves["hidden"].dtype == torch.float64 else torch.float32

    def ring(slots: int, *payload: Tensor) -> list[Tensor]:
        marks = [like.new_zeros(B, slots) for _ in range(2)]
        return [like.new_zeros(B), like.new_zeros(B), like.new_zeros(B, slots, dtype=torch.bool), *marks, *payload]

    value = leaves["table"].new_zeros(B, 9, D)
    return dict(history=ring(2, like.new_zeros(B, 2)), conv=ring(9, value, value.new_zeros(B, 9, 3 * G + 1, dtype=wide)))


def relative(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; of integers the share that differs."""
    if not expected.is_floating_point():
        return float((got != expected).double().mean())
    return float((got.double() - expected).norm() / expected.norm())


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Check all, one line each; returns exit status and record."""
    found, records = devices(options.device), []
    if torch.cuda.is_available() and options.device is None and "cuda" not in found:
        print("cuda: not checked, this build of engram has no CUDA kernels")
    for op in ops.__all__:
        dtypes = TOLERANCES if inputs(op)[0] else {torch.int64: (0.0, None)}
        if op in EXACT:
            dtypes = dict.fromkeys(TOLERANCES, (0.0, None))
        for device in found:
            for dtype, tolerance in dtypes.items():
                records.append(check_one(op, device, dtype, tolerance))
    failed = sum(not record["ok"] for record in records)
    print(f"check: {len(records) - failed} of {len(records)} good" + (f", {failed} FAILED" if failed else ""))
    return (1 if failed else 0), {"ok": not failed, "checks": records}


def check_one(op: str, device: str, dtype: torch.dtype, tolerance: tuple[float, float | None]) -> dict[str, Any]:
    """Check, print one line, return it as a record."""
    record: dict[str, Any] = {"op": op, "device": device, "dtype": str(dtype).removeprefix("torch.")}
    try:
        forward, gradients = errors = measure(op, device, dtype)
        # "not <=" rather than ">": a NaN fails.
        record["ok"] = all(e is None or t is not None and e <= t for e, t in zip(errors, tolerance))
        record |= {"forward": forward, "gradients": gradients}
        exact = "" if forward else "  exact"
        text = f"forward {forward:7.1e}" + (f"  gradients {gradients:7.1e}" if gradients is not None else exact)
    except Exception as error:  # noqa: BLE001  an operator that raises is a finding like any other
        record |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
        text = record["error"].splitlines()[0]
    print(f"{op:14} {device:5} {record['dtype']:9} {text:40} {'ok' if record['ok'] else 'FAILED'}", flush=True)
    return record
