"""ngram_hash: its errors, and windows small enough to write down."""
import re

import pytest
import torch
from engram import ops, reference
from samples import DEVICES, named

INT64_MAX = torch.iinfo(torch.int64).max
HASH = [ops.ngram_hash, reference.ngram_hash]


def window(function, ids, order=3, **rest) -> list[list[int]]:
    """What each token sees, newest first: with multipliers 1, 1000, 1000**2, ... the digits of the hash are the ids."""
    ids = torch.tensor([ids])
    multipliers = torch.tensor([[1000**s for s in range(order)]])
    moduli = torch.full((1, order - 1), 2**62)
    rows = function(ids, multipliers, moduli, torch.zeros_like(moduli), **rest)
    xor = rows[0, 0, :, -1].tolist()
    return xor


def hashed(*windows: tuple[int, ...]) -> list[int]:
    result = []
    for window in windows:
        mix = 0
        for s, token in enumerate(window):
            mix ^= token * 1000**s
        result.append(mix)
    return result


@pytest.mark.parametrize("function", HASH)
def test_window_reaches_back_to_the_start(function):
    assert window(function, [11, 12, 13, 14], pad_id=7) == hashed((11, 7, 7), (12, 11, 7), (13, 12, 11), (14, 13, 12))


@pytest.mark.parametrize("function", HASH)
def test_documents_and_their_return(function):
    """A B A: the second A does not see the first one."""
    seen = window(function, [11, 12, 13, 14, 15], pad_id=7, document_ids=torch.tensor([[1, 1, 2, 1, 1]]))
    assert seen == hashed((11, 7, 7), (12, 11, 7), (13, 7, 7), (14, 7, 7), (15, 14, 7))


@pytest.mark.parametrize("function", HASH)
def test_one_token_documents_are_not_merged(function):
    seen = window(function, [11, 12, 13], pad_id=7, document_ids=torch.tensor([[0, 1, 2]]))
    assert seen == hashed((11, 7, 7), (12, 7, 7), (13, 7, 7))


@pytest.mark.parametrize("function", HASH)
def test_mask_latches(function):
    """What is older than a masked token is out of sight, too; a masked token sees nothing, not even itself."""
    mask = torch.tensor([[True, False, True, True, True]])
    seen = window(function, [11, 12, 13, 14, 15], pad_id=7, mask=mask)
    assert seen == hashed((11, 7, 7), (7, 7, 7), (13, 7, 7), (14, 13, 7), (15, 14, 13))


@pytest.mark.parametrize("function", HASH)
def test_history_comes_before_the_first_token(function):
    seen = window(function, [11, 12], order=4, pad_id=7, history=torch.tensor([[1, 2, 3]]))
    assert seen == hashed((11, 3, 2, 1), (12, 11, 3, 2))


@pytest.mark.parametrize("function", HASH)
def test_negative_history_blocks_itself_and_what_is_older(function):
    seen = window(function, [11, 12], order=4, pad_id=7, history=torch.tensor([[1, -1, 3]]))
    assert seen == hashed((11, 3, 7, 7), (12, 11, 3, 7))


@pytest.mark.parametrize("function", HASH)
def test_history_belongs_to_the_first_document(function):
    seen = window(function, [11, 12], pad_id=7, history=torch.tensor([[1, 2]]), document_ids=torch.tensor([[5, 6]]))
    assert seen == hashed((11, 2, 1), (12, 7, 7))


@pytest.mark.parametrize("function", HASH)
def test_everything_goes_through_the_map(function):
    """Ids, history and pad; ids that share a compressed id hash alike."""
    token_map = torch.tensor([40, 41, 41, 42], dtype=torch.int32)
    seen = window(function, [1, 2], pad_id=3, token_map=token_map, history=torch.tensor([[-1, 0]]))
    assert seen == hashed((41, 40, 42), (41, 41, 40))
    assert seen == window(function, [2, 1], pad_id=3, token_map=token_map, history=torch.tensor([[-1, 0]]))


def test_orders_are_prefixes():
    """The bigram columns of a 4-gram hash are those of a bigram hash with the same constants."""
    inputs = named("ngram_hash", "fourgrams")[0]()
    heads = inputs["moduli"].shape[1] // 3
    for order in (2, 3):
        part = slice(0, (order - 1) * heads)
        fewer = {**inputs, "multipliers": inputs["multipliers"][:, :order], "moduli": inputs["moduli"][:, part],
                 "offsets": inputs["offsets"][:, part]}
        assert torch.equal(ops.ngram_hash(**fewer), ops.ngram_hash(**inputs)[..., part])


def test_layers_are_independent():
    inputs = named("ngram_hash", "everything")[0]()
    for layer in range(inputs["multipliers"].shape[0]):
        one = {**inputs, **{name: inputs[name][layer:layer + 1] for name in ("multipliers", "moduli", "offsets")}}
        assert torch.equal(ops.ngram_hash(**one)[0], ops.ngram_hash(**inputs)[layer])


@pytest.mark.parametrize("device", DEVICES)
def test_int32_ids_equal_int64_ids(device):
    inputs = named("ngram_hash", "int32")[0](device)
    longer = {**inputs, "token_ids": inputs["token_ids"].long(), "document_ids": inputs["document_ids"].long()}
    assert torch.equal(ops.ngram_hash(**inputs), ops.ngram_hash(**longer))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_documents_and_history_of_any_integer_dtype(dtype):
    inputs = named("ngram_hash", "everything")[0]()
    inputs["document_ids"] = inputs["document_ids"].abs()
    narrow = {**inputs, "document_ids": inputs["document_ids"].to(dtype), "history": inputs["history"].to(dtype)}
    assert torch.equal(ops.ngram_hash(**narrow), ops.ngram_hash(**inputs))


@pytest.mark.parametrize("function", HASH)
@pytest.mark.parametrize("token", [-100, -1, 50, INT64_MAX, -INT64_MAX - 1])
def test_ids_outside_the_map(function, token):
    inputs = named("ngram_hash", "map")[0]()
    inputs["token_ids"][1, 4] = token
    with pytest.raises(IndexError, match=rf"^ngram_hash: token_ids.* must be in \[0, 50\).*, got {token}$"):
        function(**inputs)
    hidden = torch.ones_like(inputs["token_ids"], dtype=torch.bool)
    hidden[1, 4] = False
    assert (function(**inputs, **{"mask": hidden} if inputs.pop("mask") is None else {}) >= 0).all()
    # Without a map any int64 is hashed.
    raw = {**inputs, "token_map": None}
    rows = function(**raw) - raw["offsets"][:, None, None]
    assert ((rows >= 0) & (rows < raw["moduli"][:, None, None])).all()


@pytest.mark.parametrize("function", HASH)
@pytest.mark.parametrize("token", [50, INT64_MAX])
def test_history_outside_the_map(function, token):
    inputs = named("ngram_hash", "map")[0]()
    inputs["history"] = torch.tensor([[3, 4], [5, token]])
    with pytest.raises(IndexError, match=rf"^ngram_hash: .*history must be in \[0, 50\).*, got {token}$"):
        function(**inputs)
    inputs["history"] = torch.tensor([[3, 4], [token, -1]])     # behind a negative entry it is never read
    function(**inputs)


def test_different_trigrams_seldom_share_all_rows():
    """Constants of the size of a real model: 20,000 trigrams, and no two agree in four columns."""
    trigrams = torch.randint(99092, (20_000, 3), generator=torch.Generator().manual_seed(0)).unique(dim=0)
    multipliers = torch.tensor([[76632096046245, 4839876093313, 35959672319349]])
    moduli = torch.tensor([[646403, 646411, 646421, 646423, 646537, 646549, 646571, 646573]])
    rows = ops.ngram_hash(trigrams, multipliers, moduli, torch.zeros_like(moduli), pad_id=2)[0, :, -1, 4:]
    assert rows.unique(dim=0).shape == (trigrams.shape[0], 4)
    assert rows.float().mean(0).sub(646500 / 2).abs().max() < 646500 * 0.02


class Hashed(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return ops.ngram_hash(**named("ngram_hash", "long")[0](seed=index))


def test_in_dataloader_workers():
    """Workers forked after the parent has used its threads."""
    expected = [Hashed()[index] for index in range(6)]
    loader = torch.utils.data.DataLoader(Hashed(), batch_size=None, num_workers=2, timeout=60)
    assert all(torch.equal(rows, e) for rows, e in zip(loader, expected))


def test_the_first_bad_id_is_the_one_named():
    """Found by several threads, reported as one thread would."""
    inputs = named("ngram_hash", "long")[0]() | dict(mask=None)
    inputs["token_ids"] = inputs["token_ids"].clamp(min=0)
    inputs["token_ids"].view(-1)[[700, 1900, 4000]] = torch.tensor([-700, -1900, -4000])
    for _ in range(10):
        with pytest.raises(IndexError, match="got -700$"):
            ops.ngram_hash(**inputs)


MAP = torch.zeros(50, dtype=torch.int32)


@pytest.mark.parametrize("argument, value, expected", [
    ("token_ids", torch.zeros(2, 19), "int64 or int32"),
    ("token_ids", torch.zeros(2, 19, dtype=torch.bool), "int64 or int32"),
    ("token_ids", torch.zeros(19, dtype=torch.int64), "[B, T]"),
    ("token_ids", torch.zeros(1, 2, 19, dtype=torch.int64), "[B, T]"),
    ("multipliers", torch.ones(2, 3), "int64"),
    ("multipliers", torch.ones(2, 3, dtype=torch.int32), "int64"),
    ("multipliers", torch.ones(3, dtype=torch.int64), "[L, N] with N >= 2"),
    ("multipliers", torch.ones(2, 1, dtype=torch.int64), "[L, N] with N >= 2"),
    ("moduli", torch.ones(2, 4), "int64"),
    ("moduli", torch.ones(4, dtype=torch.int64), "[L, C]"),
    ("moduli", torch.ones(1, 4, dtype=torch.int64), "[L, C]"),
    ("moduli", torch.ones(2, 3, dtype=torch.int64), "C a multiple of N - 1"),
    ("moduli", torch.tensor([[5, 5, 5, 5], [5, 5, 0, 5]]), "positive"),
    ("moduli", torch.tensor([[5, 5, -7, 5], [5, 5, 5, 5]]), "positive"),
    ("offsets", torch.ones(2, 4), "int64"),
    ("offsets", torch.ones(2, 5, dtype=torch.int64), "[L, C] = [2, 4]"),
    ("pad_id", 50, "in [0, 50)"),
    ("pad_id", -1, "in [0, 50)"),
    ("token_map", MAP.long(), "int32 [V]"),
    ("token_map", MAP.float(), "int32 [V]"),
    ("token_map", MAP[None], "int32 [V]"),
    ("document_ids", torch.zeros(2, 19), "integer"),
    ("document_ids", torch.zeros(2, 19, dtype=torch.bool), "integer"),
    ("document_ids", torch.zeros(19, dtype=torch.int64), "[B, T] = [2, 19]"),
    ("document_ids", torch.zeros(3, 2, 19, dtype=torch.int64), "[B, T] = [2, 19]"),
    ("mask", torch.ones(2, 19), "bool"),
    ("mask", torch.ones(2, 19, dtype=torch.int64), "bool"),
    ("mask", torch.ones(2, 1, dtype=torch.bool), "[B, T] = [2, 19]"),
    ("history", torch.zeros(2, 2), "integer"),
    ("history", torch.zeros(2, 3, dtype=torch.int64), "[B, N - 1] = [2, 2]"),
    ("history", torch.zeros(1, 2, dtype=torch.int64), "[B, N - 1] = [2, 2]"),
])
def test_errors(argument, value, expected):
    inputs = named("ngram_hash", "map")[0]() | {argument: value}
    with pytest.raises(ValueError, match=rf"^ngram_hash: {argument} must be .*{re.escape(expected)}.*, got "):
        ops.ngram_hash(**inputs)


@pytest.mark.parametrize("argument", [
    "multipliers", "moduli", "offsets", "token_map", "document_ids", "mask", "history",
])
def test_devices_do_not_mix(argument):
    inputs = named("ngram_hash", "everything")[0]()
    inputs[argument] = inputs[argument].to("meta")
    with pytest.raises(ValueError, match=rf"^ngram_hash: .*{argument} on meta"):
        ops.ngram_hash(**inputs)


@pytest.mark.parametrize("moduli", [
    [4096, 4099, 646403, 16000057, 2**31 - 1, 2**40 + 15, 2**61 - 1, 2**62 - 1],  # all of them fit the vector path
    [1, 2, 3, 7, 4095, 4096, 2**62, 2**63 - 1],
    [20000003],
])
def test_the_modulus_is_exact(moduli):
    """Without a division, but as `%` has it: ten million values, multiples of every modulus and the ends of int64."""
    generator = torch.Generator().manual_seed(0)
    high = torch.randint(-(2**31), 2**31, (1_250_000,), generator=generator) << 32
    random = (high | torch.randint(0, 2**32, high.shape, generator=generator)) >> torch.arange(high.numel()) % 63
    edges = [0, 1, -1, INT64_MAX, INT64_MAX - 1, -INT64_MAX - 1, -INT64_MAX]
    for p in moduli:
        for k in (1, 2, INT64_MAX // p // 2, INT64_MAX // p):
            edges += [sign * k * p + d for sign in (1, -1) for d in (-1, 0, 1)]
    edges = [edge for edge in edges if -INT64_MAX - 1 <= edge <= INT64_MAX]
    ids = torch.cat([random, torch.tensor(edges)])[None]
    column = torch.tensor([moduli])
    constants = dict(multipliers=torch.tensor([[1, 0]]), moduli=column, offsets=torch.zeros_like(column), pad_id=0)
    assert torch.equal(ops.ngram_hash(ids, **constants)[0, 0], ids[0, :, None] % column)
