"""What embedding_fp8 and embedding_int8 have in common: the edges of a table and of its shards, what is refused."""
import pytest
import torch
from engram import ops, reference
from samples import DEVICES, DTYPES, bits, named

INT64_MAX = torch.iinfo(torch.int64).max
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SCALED = ["embedding_fp8", "embedding_int8"]
ROOMS = [ops, reference]


def random_table(op: str, rows: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Any bytes; values and scales."""
    if op == "embedding_int8":
        return torch.randint(-128, 128, (rows, width), device=device).to(torch.int8), torch.randn(rows, device=device)
    return tuple(torch.randint(256, (rows, columns), dtype=torch.uint8, device=device).view(dtype)
                 for columns, dtype in ((width, E4M3), (-(-width // 32), E8M0)))


def ones_among_nan(op: str, rows: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ones, as a slice of a table with a row of NaN before and after."""
    if op == "embedding_int8":
        values = torch.full((rows + 2, width), 100, dtype=torch.int8, device=device)
        scales = torch.full((rows + 2,), torch.nan, device=device)
        values[1:-1], scales[1:-1] = 1, 1
        return values[1:-1], scales[1:-1]
    values = torch.full((rows + 2, width), 0x7f, dtype=torch.uint8, device=device)
    scales = torch.full((rows + 2, -(-width // 32)), 255, dtype=torch.uint8, device=device)
    values[1:-1], scales[1:-1] = 0x38, 127
    return values[1:-1].view(E4M3), scales[1:-1].view(E8M0)


@pytest.mark.parametrize("op", SCALED)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("row", [-1, -100, 37, 38, INT64_MAX, -INT64_MAX - 1])
def test_rows_outside_the_table(op, room, row):
    inputs = named(op, "plain")[0](dtype=torch.float32)
    inputs["rows"][1, 2, 3] = row
    with pytest.raises(IndexError, match=rf"^{op}: rows must be in \[0, 37\).*, got {row}$"):
        getattr(room, op)(**inputs)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 2] = False                  # masked rows are never read
    assert not getattr(room, op)(**inputs | dict(mask=mask))[1, 2].any()


@pytest.mark.parametrize("op", SCALED)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("row_begin", [0, 100, 2**62])
@pytest.mark.parametrize("far", [INT64_MAX, -INT64_MAX - 1, 0])
def test_rows_of_other_shards(op, room, row_begin, far):
    rows = torch.tensor([[row_begin - 1, row_begin, row_begin + 5, far]])
    inside = torch.tensor([[row_begin <= row < row_begin + 5 for row in rows[0].tolist()]])
    out = getattr(room, op)(*ones_among_nan(op, 5, 3, "cpu"), rows, row_begin=row_begin)
    assert torch.equal(out, inside[..., None].bfloat16().expand(1, 4, 3))


@pytest.mark.parametrize("op", SCALED)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [1, 40, 256])
def test_shards_make_up_the_table(op, device, dtype, index, masked, width):
    """Each shard gives the bits of the whole table for its own rows, zeros for all others; an empty one nothing."""
    look_up, (values, scales) = getattr(ops, op), random_table(op, 60, width, device)
    rows = torch.randint(60, (2, 31, 3), device=device).to(index)
    mask = torch.rand(2, 31, device=device) < 0.6 if masked else None
    whole = look_up(values, scales, rows, dtype=dtype, mask=mask)
    for begin, end in ((0, 0), (0, 13), (13, 14), (14, 60), (60, 60)):
        shard = look_up(values[begin:end], scales[begin:end], rows, dtype=dtype, row_begin=begin, mask=mask)
        inside = (begin <= rows) & (rows < end)
        assert torch.equal(bits(shard), bits(whole) * inside[..., None])


@pytest.mark.parametrize("op", SCALED)
@pytest.mark.parametrize("device", DEVICES)
def test_neighbours_are_not_read(op, device):
    """The rows around a shard, and what lies beside a slice of the table, are NaN."""
    shard = ones_among_nan(op, 5, 65, device)
    out = getattr(ops, op)(*shard, torch.arange(49, 56, device=device)[:, None], row_begin=50)
    assert torch.equal(out[1:-1, 0], torch.ones_like(out[1:-1, 0])) and not out[0].any() and not out[-1].any()


@pytest.mark.parametrize("op, name", [  # integers cannot require one
    ("embedding_fp8", "values"), ("embedding_fp8", "scales"), ("embedding_int8", "scales")])
@pytest.mark.parametrize("room", ROOMS)
def test_a_gradient_is_refused(op, name, room):
    inputs = named(op, "plain")[0](dtype=torch.float32)
    inputs[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{op}: {name} must not require a gradient, got requires_grad=True"):
        getattr(room, op)(**inputs)
    with torch.no_grad():
        assert not getattr(room, op)(**inputs).requires_grad


@pytest.mark.parametrize("op", SCALED)
@pytest.mark.parametrize("argument", ["scales", "rows", "mask"])
def test_devices_do_not_mix(op, argument):
    inputs = named(op, "mask")[0](dtype=torch.float32)
    inputs[argument] = inputs[argument].to("meta")
    with pytest.raises(ValueError, match=rf"^{op}: .*{argument} on meta"):
        getattr(ops, op)(**inputs)
