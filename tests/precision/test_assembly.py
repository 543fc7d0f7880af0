"""The assembly that kernels embed, run instruction by instruction with NumPy: no GPU is needed to see what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from narrowgate.precision.formats import E4M3, E5M2
from narrowgate.precision.kernels.assembly import philox_words, stochastic_codes
from narrowgate.precision.rounding import encode, round_stochastic
from narrowgate.precision.stochastic import ROUNDS, philox
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def run(text: str, inputs: Mapping[int, Words]) -> dict[str, Words]:
    """Run PTX of 32-bit registers, and of 64-bit ones that hold a product; return all registers."""
    size = next(iter(inputs.values())).shape
    registers: dict[str, NDArray] = {f"${number}": words for number, words in inputs.items()}

    def read(name: str) -> NDArray:
        if name in registers:
            return registers[name]
        return np.full(size, int(name[2:], 16) if name.startswith("0f") else int(name, 0), np.uint32)

    for line in text.strip("{} ").replace("; ", ";").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        target, *names = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if operation == "mov.b64":
            low, high = target.strip("{}").replace(" ", "").split(",")
            product = registers[names[0]]
            registers[low], registers[high] = product.astype(np.uint32), (product >> np.uint64(32)).astype(np.uint32)
            continue
        registers[target] = OPERATIONS[operation](*map(read, names))
    return registers


def _towards_zero(a: Words, b: Words) -> Words:
    # A product of two FP32 numbers is exact in FP64.
    exact = a.view(np.float32).astype(np.float64) * b.view(np.float32)
    nearest = exact.astype(np.float32)
    past = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    return np.where(past, np.nextafter(nearest, np.float32(0)), nearest).astype(np.float32).view(np.uint32)


def _gathered(a: Words, b: Words, places: Words) -> Words:
    whole = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for i in range(4):
        place = places >> np.uint32(4 * i) & np.uint32(15)
        assert (place < 8).all(), "signs of bytes are not repeated here"
        byte = whole >> (8 * place.astype(np.uint64)) & np.uint64(255)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def _looked_up(a: Words, b: Words, c: Words, table: Words) -> Words:
    result = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


OPERATIONS = {
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "mul.rz.f32": _towards_zero,
    "min.u32": np.minimum,
    "add.u32": np.add,
    "xor.b32": np.bitwise_xor,
    "mov.b32": np.copy,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.wide.u32": lambda a, b: a.astype(np.uint64) * b,
    "prmt.b32": _gathered,
    "lop3.b32": _looked_up,
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_stochastic_codes_are_those_of_the_reference(element, clamped, turned):
    generator = torch.Generator().manual_seed(5)
    size = (4, 100_000)
    x = torch.randn(size, generator=generator) * torch.exp2(torch.randint(-40, 20, size, generator=generator).float())
    x[:, :8] = torch.tensor([0.0, -0.0, 1e-45, -1e-45, element.max, -element.max, element.min_subnormal, 1.0])
    if clamped:
        x[:, 8:12] = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38])
    else:
        # As far past the largest as an amax that its own scale has scaled.
        past = (torch.tensor(element.max).view(torch.int32) + 7).view(torch.float32)
        x = x.clamp(-past, past)
    bits = torch.randint(0, 1 << 16, size, generator=generator)
    bits[:, :2_000], bits[:, 2_000:4_000] = 0, 0xFFFF
    x[:, 2_000:2_012] = x[:, :12]
    first, second = ((bits[0], bits[2]), (bits[1], bits[3])) if turned else ((bits[0], bits[1]), (bits[2], bits[3]))
    words = {5: first[0] | first[1] << 16, 6: second[0] | second[1] << 16}
    inputs = {i + 1: x[i].numpy().view(np.uint32) for i in range(4)}
    inputs |= {number: word.numpy().astype(np.uint32) for number, word in words.items()}
    found = run(stochastic_codes(element, clamped=clamped, turned=turned), inputs)["$0"]
    expected = encode(round_stochastic(x, element, bits), element).view(torch.uint8).numpy()
    for i in range(4):
        assert np.array_equal(found >> np.uint32(8 * i) & np.uint32(255), expected[i]), i


def test_philox_words_are_those_of_the_reference():
    generator = torch.Generator().manual_seed(6)
    counter, key = torch.randint(0, 1 << 62, (2, 1000), generator=generator)
    halves = [counter, counter >> 32, key, key >> 32]
    inputs = {4 + i: (half & 0xFFFFFFFF).numpy().astype(np.uint32) for i, half in enumerate(halves)}
    found = run(philox_words(ROUNDS), inputs)
    for i in range(0, 1000, 97):
        expected = philox(int(key[i]), counter[i : i + 1])
        assert [int(found[f"${place}"][i]) for place in range(4)] == [int(word) for word in expected]
