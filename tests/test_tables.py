"""Hash constants: multipliers against numpy, primes against brute force and the published tables."""
import json
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram import tables

CONSTANTS = json.loads((Path(__file__).parent / "data" / "constants.json").read_text())


def numpy_multipliers(layer_id, order, vocab_size, seed):
    half = max(1, (2**63 - 1) // vocab_size // 2)
    drawn = np.random.default_rng(seed + 10007 * layer_id).integers(0, half, size=order, dtype=np.int64)
    return tuple((drawn * 2 + 1).tolist())


@pytest.mark.parametrize("vocab_size", [1, 2, 442, 99092, 128815, 129280, 2**30 - 1])
@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1, 2**40 + 5, 2**70, 2**200])
def test_multipliers_are_those_of_numpy(vocab_size, seed):
    for layer_id in (0, 1, 14, 15, 61):
        expected = numpy_multipliers(layer_id, 4, vocab_size, seed)
        assert tables.layer_multipliers(layer_id, 4, vocab_size, seed) == expected


@given(st.integers(0, 200), st.integers(2, 6), st.integers(1, 2**30 - 1), st.integers(0, 2**130))
def test_multipliers_are_those_of_numpy_anywhere(layer_id, order, vocab_size, seed):
    drawn = tables.layer_multipliers(layer_id, order, vocab_size, seed)
    assert drawn == numpy_multipliers(layer_id, order, vocab_size, seed)
    assert all(m % 2 == 1 and m * (vocab_size - 1) < 2**63 for m in drawn)


@pytest.mark.parametrize("bound", [3 * 2**61, 2**62 + 1, 5 * 10**18, 2**32 + 1])
def test_rejection_is_that_of_numpy(bound):
    """Bounds of a hash make rejections too rare to be seen; these reject up to every fourth draw."""
    stream = tables._Pcg64(9)
    drawn = np.random.default_rng(9).integers(0, bound, size=400, dtype=np.int64)
    assert [stream.below(bound) for _ in range(400)] == drawn.tolist()


def test_multipliers_published():
    published = CONSTANTS["deepseek_v4_1_flash"]["multipliers"]
    for layer, expected in published.items():
        assert list(tables.layer_multipliers(int(layer), 4, 99092)) == expected
    for vocab_size, layers in CONSTANTS["demo_default"]["multipliers_for_compressed_vocab"].items():
        for layer, expected in layers.items():
            assert list(tables.layer_multipliers(int(layer), 3, int(vocab_size))) == expected


def splitmix64(seed, count):
    """The generator as published: a counter in steps of gamma, each value mixed."""
    values = []
    for _ in range(count):
        seed = seed + 0x9E3779B97F4A7C15 & 2**64 - 1
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 2**64 - 1
        values.append(z ^ z >> 31)
    return values


def test_multipliers_of_splitmix64():
    # First outputs for seed 0 in the generator's own test vectors.
    assert splitmix64(0, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    for layer, vocab_size, seed in ((0, 248320, 1234), (1, 300, 1234), (7, 1, 0), (2, 2**30 - 1, 2**64 - 1)):
        half = max(1, (2**63 - 1) // vocab_size // 2)
        # The first value of the stream is left out: gamma is added once by the rule, once by the generator.
        expected = [2 * (r % half) + 1 for r in splitmix64(seed + 10007 * layer, 5)[1:]]
        assert list(tables.layer_multipliers(layer, 4, vocab_size, seed, "splitmix64")) == expected
    published = CONSTANTS["qwen3_8_flash_next"]
    assert list(tables.layer_multipliers(0, 3, 248320, 1234, "splitmix64")) == published["multipliers"]


@pytest.mark.parametrize("arguments, message", [
    ((1, 3, 0), r"hashed_vocab_size must be in \[1, 2\*\*30\), got 0"),
    ((1, 3, 2**30), "hashed_vocab_size must be in"),
    ((1, 3, 442, -1), "seed and layer_id must be >= 0, got seed -1"),
    ((-2, 3, 442), "layer_id -2"),
    ((1, 3, 442, 0, "mt19937"), "rule must be 'pcg64' or 'splitmix64', got 'mt19937'"),
])
def test_multipliers_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        tables.layer_multipliers(*arguments)


@pytest.mark.parametrize("moduli, bases, published", [
    ("deepseek_v4_1_flash", (16_000_000,) * 3, "primes"),
    ("paper_27b_inferred", (2_262_400,) * 2, "primes_layers_1_14"),
    ("paper_40b_inferred", (7_239_680,) * 2, "primes_layers_1_14"),
    ("demo_default", (646_400,) * 2, "primes"),
])
def test_moduli_published(moduli, bases, published):
    entry = CONSTANTS[moduli]
    expected = [[size for order in layer for size in order] for layer in entry[published].values()]
    found = tables.prime_moduli(2, 8, bases)
    assert [list(row) for row in found] == expected
    rows = entry.get("table_rows") or entry.get("rows_per_layer")
    if rows:
        assert [sum(row) for row in found] == rows


def test_moduli_are_the_next_unused_primes():
    layers, heads, bases = 3, 4, (50, 30, 1000)
    used, expected = set(), []
    for _ in range(layers):
        row = []
        for base in bases:
            size = base - 1
            for _ in range(heads):
                size += 1
                while size in used or any(size % p == 0 for p in range(2, size)):
                    size += 1
                used.add(size)
                row.append(size)
        expected.append(tuple(row))
    assert tables.prime_moduli(layers, heads, bases) == tuple(expected)
    assert len(used) == layers * heads * len(bases)


def test_moduli_with_one_base_are_the_nth_primes():
    """The rule of Qwen: column c of layer l has the (l * C + c + 1)-th prime from the base on."""
    published = CONSTANTS["qwen3_8_flash_next"]["primes"]
    assert list(tables.prime_moduli(1, 8, (20_000_000,) * 2)[0]) == published
    primes = [n for n in range(64, 400) if tables.is_prime(n)]
    rows = tables.prime_moduli(3, 4, (64, 64))
    assert [size for row in rows for size in row] == primes[:24]


def test_moduli_unique_within_a_layer_only():
    assert tables.prime_moduli(3, 2, (100, 100), unique=False) == ((101, 103, 107, 109),) * 3
    assert tables.prime_moduli(2, 2, (100, 50), unique=False) == tables.prime_moduli(1, 2, (100, 50)) * 2


def test_smallest_base():
    assert tables.prime_moduli(1, 3, (1,)) == ((2, 3, 5),)


def test_is_prime():
    limit = 10_000
    sieve = np.ones(limit, dtype=bool)
    sieve[:2] = False
    for p in range(2, 100):
        if sieve[p]:
            sieve[p * p::p] = False
    assert [n for n in range(limit) if tables.is_prime(n)] == np.flatnonzero(sieve).tolist()
    # Strong pseudoprimes to the first four, nine and eleven primes.
    for composite in (3215031751, 3825123056546413051, 3186658578340311511674610):
        assert not tables.is_prime(composite)
    assert tables.is_prime(2**61 - 1) and tables.is_prime(2**89 - 1) and not tables.is_prime((2**31 - 1) ** 2)


def test_row_offsets():
    moduli = (7, 5, 11, 2)
    assert tables.row_offsets(moduli) == (0, 7, 12, 23)
    assert tables.row_offsets(moduli) == tuple(accumulate(moduli, initial=0))[:-1]
