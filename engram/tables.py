"""Constants of the n-gram hash: odd multipliers, prime table sizes, row offsets.

All of it is pure Python integers, so the constants of a layer never depend on the version of another library: numpy
does not promise that its `Generator` streams stay the same, hence the stream is reproduced here.

Source: `NgramHashMapping` of the official demo (deepseek-ai/Engram, `engram_demo_v1.py`); `SeedSequence`, `PCG64` and
`Generator.integers` of numpy; PCG XSL-RR 128/64 (O'Neill, 2014); Lemire's bounded integers (arXiv 1805.10941); the
n-gram embedding of `qwen4_exp` in transformers; SplitMix64 (Steele, Lea and Flood, 2014).
"""
from functools import lru_cache
from itertools import accumulate
from typing import Sequence

INT64_MAX = 2**63 - 1
MAX_HASHED_VOCAB_SIZE = 2**30 - 1  # beyond it numpy would draw from its 32-bit stream

_M32, _M64, _M128 = 2**32 - 1, 2**64 - 1, 2**128 - 1
_LAYER_STRIDE = 10007
_GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64: 2**64 over the golden ratio
# The first twelve primes decide every number below 3.3e24 (Sorenson and Webster, 2015).
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def layer_multipliers(
    layer_id: int, max_ngram_size: int, hashed_vocab_size: int, seed: int = 0, rule: str = "pcg64"
) -> tuple[int, ...]:
    """The multipliers of one layer, newest token first: `2 * r + 1`, `r` in `[0, half)`.

    With `half = max(1, (INT64_MAX // V') // 2)` they are odd, and small enough that `multiplier * id` stays below 2**63
    for every id in `[0, V')`. With `s = seed + 10007 * layer_id`,

        pcg64:       r = numpy.random.default_rng(s).integers(0, half, size=N)
        splitmix64:  r[i] = mix(s + gamma * (i + 1)) % half, where mix adds gamma once more

    Args:
        layer_id: >= 0, as listed in the configuration (or what stands for it there, see `EngramConfig.layer_seed`).
        max_ngram_size: N, how many multipliers to draw.
        hashed_vocab_size: V', the number of distinct ids that are hashed (the size of the compressed vocabulary).
        seed: >= 0.
        rule: "pcg64" or "splitmix64".

    Returns:
        N integers.

    Raises:
        ValueError: `hashed_vocab_size` outside `[1, 2**30)`, a negative seed or layer id, or another rule.
    """
    if not 1 <= hashed_vocab_size <= MAX_HASHED_VOCAB_SIZE:
        raise ValueError(f"hashed_vocab_size must be in [1, 2**30), got {hashed_vocab_size}")
    if seed < 0 or layer_id < 0:
        raise ValueError(f"seed and layer_id must be >= 0, got seed {seed}, layer_id {layer_id}")
    half = max(1, (INT64_MAX // hashed_vocab_size) // 2)
    if rule not in ("pcg64", "splitmix64"):
        raise ValueError(f"rule must be 'pcg64' or 'splitmix64', got {rule!r}")
    start = seed + _LAYER_STRIDE * layer_id
    if rule == "splitmix64":
        drawn = [_splitmix64(start + _GAMMA * (i + 1)) % half for i in range(max_ngram_size)]
    else:
        stream = _Pcg64(start)
        drawn = [stream.below(half) for _ in range(max_ngram_size)]
    return tuple(2 * r + 1 for r in drawn)


@lru_cache(maxsize=64)
def prime_moduli(
    layers: int, heads_per_ngram: int, bases: tuple[int, ...], unique: bool = True
) -> tuple[tuple[int, ...], ...]:
    """Prime table sizes, unique over all layers, orders and heads.

    In layer order, then order 2..N, then head: the smallest prime that is at least the order's base, greater than the
    prime of the head before, and not used yet. So the sizes of a layer depend on how many layers come before it. With
    one base for all orders, column c of layer l gets the (l * C + c + 1)-th prime from the base on.

    Args:
        layers: L.
        heads_per_ngram: H.
        bases: per order 2..N the lower bound of the size of one head's table.
        unique: False: unique over orders and heads of one layer only, all layers get the same sizes.

    Returns:
        L rows of C = (N - 1) * H primes, order-major, then head.
    """
    if not unique:
        return prime_moduli(1, heads_per_ngram, bases) * layers
    used: set[int] = set()
    moduli = []
    for _ in range(layers):
        row = []
        for base in bases:
            candidate = base - 1
            for _ in range(heads_per_ngram):
                candidate += 1
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                row.append(candidate)
        moduli.append(tuple(row))
    return tuple(moduli)


def row_offsets(moduli: Sequence[int]) -> tuple[int, ...]:
    """First row of every head's table inside the layer's table: the exclusive prefix sum of `moduli` [C]."""
    return tuple(accumulate(moduli, initial=0))[:-1]


def is_prime(n: int) -> bool:
    """Miller-Rabin with fixed witnesses: exact for every n below 3.3e24."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        x = pow(witness, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def _splitmix64(x: int) -> int:
    """One step of SplitMix64 from state `x`, modulo 2**64."""
    x = x + _GAMMA & _M64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _M64
    return x ^ x >> 31


class _Pcg64:
    """The 64-bit stream of `numpy.random.default_rng(seed)`."""

    _MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645

    def __init__(self, seed: int) -> None:
        w0, w1, w2, w3 = _seed_words(seed)
        self._increment = ((w2 << 64 | w3) << 1 | 1) & _M128
        self._state = 0
        self._step()
        self._state = self._state + (w0 << 64 | w1) & _M128
        self._step()

    def _step(self) -> None:
        self._state = self._state * self._MULTIPLIER + self._increment & _M128

    def next(self) -> int:
        """64 random bits (XSL-RR: xor the halves, rotate by the top six bits)."""
        self._step()
        value = (self._state >> 64) ^ (self._state & _M64)
        turn = self._state >> 122
        return (value >> turn | value << (64 - turn)) & _M64

    def below(self, bound: int) -> int:
        """Uniform in [0, bound) for bound > 2**32 by Lemire's rejection: high word of a product, low word tested."""
        threshold = (2**64 - bound) % bound
        while True:
            product = self.next() * bound
            if product & _M64 >= threshold:
                return product >> 64


def _seed_words(entropy: int) -> list[int]:
    """`numpy.random.SeedSequence(entropy).generate_state(4, uint64)`."""
    words = [entropy & _M32]
    while entropy := entropy >> 32:
        words.append(entropy & _M32)

    constant = 0x43B0D7E5

    def hash_word(value: int) -> int:
        nonlocal constant
        value ^= constant
        constant = constant * 0x931E8875 & _M32
        value = value * constant & _M32
        return value ^ value >> 16

    def mix(x: int, y: int) -> int:
        value = (0xCA01F9DD * x - 0x4973F715 * y) & _M32
        return value ^ value >> 16

    pool = [hash_word(word) for word in (words + [0, 0, 0])[:4]]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = mix(pool[target], hash_word(pool[source]))
    for word in words[4:]:
        for target in range(4):
            pool[target] = mix(pool[target], hash_word(word))

    constant, halves = 0x8B51F9DD, []
    for i in range(8):
        value = pool[i % 4] ^ constant
        constant = constant * 0x58F38DED & _M32
        value = value * constant & _M32
        halves.append(value ^ value >> 16)
    return [halves[i] | halves[i + 1] << 32 for i in range(0, 8, 2)]
