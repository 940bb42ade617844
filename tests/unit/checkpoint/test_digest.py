import numpy as np
import pytest
import torch

from headwater.checkpoint.digest import (
    BLOCK_BYTES,
    BLOCK_LANES,
    Digester,
    digest,
    digest_bytes,
    digest_on_device,
)

MASK = (1 << 64) - 1
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
LENGTHS = [0, 1, 3, 7, 8, 9, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 5, 3 * BLOCK_BYTES + 24]


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def random_lanes(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1 << 64, count, dtype=np.uint64)


def splitmix64(index: int) -> int:
    z = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def digest_by_the_formula(data: bytes) -> int:
    padded = data + bytes(-len(data) % 8)
    total = 0
    for block, start in enumerate(range(0, len(padded), BLOCK_BYTES)):
        block_sum = 0
        for lane in range(min(BLOCK_LANES, (len(padded) - start) // 8)):
            value = int.from_bytes(padded[start + 8 * lane : start + 8 * lane + 8], "little")
            mixed = (value ^ value >> 32) * (splitmix64(lane) | 1) & MASK
            block_sum += mixed ^ mixed >> 29
        block_sum &= MASK
        total += (block_sum ^ block_sum >> 31) * (splitmix64(BLOCK_LANES + block) | 1)
    return splitmix64(total & MASK ^ splitmix64(len(data)))


def test_splitmix64_is_the_published_sequence():
    assert splitmix64(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("length", [0, 5, 64, BLOCK_BYTES + 12])
def test_value_is_that_of_the_formula_in_plain_integers(length: int):
    data = random_bytes(length).tobytes()
    assert digest_bytes(data) == digest_by_the_formula(data)


def test_value_is_fixed_for_all_time():
    assert digest_bytes(b"headwater") == 0x5EB5673B15B01052


@pytest.mark.parametrize("length", LENGTHS)
def test_torch_path_equals_numpy_path_for_any_length(length: int):
    data = random_bytes(length)
    assert digest_on_device(torch.from_numpy(data.copy())) == digest_bytes(data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_of_any_dtype_has_the_digest_of_its_bytes(dtype: torch.dtype):
    raw = torch.from_numpy(random_bytes(8 * 77).copy())
    tensor = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    expected = digest_bytes(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))
    assert digest(tensor) == expected
    assert digest_on_device(tensor) == expected


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t.T, id="transposed"),
        pytest.param(lambda t: t[1:, 3:], id="inner box"),
        pytest.param(lambda t: t.reshape(-1)[1:], id="not aligned to a lane"),
        pytest.param(lambda t: t[:, ::2], id="strided"),
        pytest.param(lambda t: t[0, 0], id="scalar"),
        pytest.param(lambda t: t[:0], id="empty"),
        pytest.param(lambda t: t[:1].expand(5, -1), id="expanded"),
    ],
)
def test_view_has_the_digest_of_its_contiguous_copy(view):
    tensor = view(torch.randn(9, 11).bfloat16())
    expected = digest_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    assert digest(tensor) == expected
    assert digest_on_device(tensor) == expected


def test_parameter_that_requires_grad_is_read():
    parameter = torch.nn.Parameter(torch.ones(4))
    assert digest(parameter) == digest(torch.ones(4)) == digest_on_device(parameter)


def test_slabs_of_the_torch_path_do_not_change_the_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headwater.checkpoint.digest._SLAB_BYTES", BLOCK_BYTES)
    data = random_bytes(2 * BLOCK_BYTES + 100)
    assert digest_on_device(torch.from_numpy(data.copy())) == digest_bytes(data)


@pytest.mark.parametrize("cuts", [[1], [7, 8, 9], [BLOCK_BYTES - 3], [BLOCK_BYTES, BLOCK_BYTES + 1]])
def test_how_a_stream_is_cut_does_not_change_the_value(cuts: list[int]):
    data = random_bytes(2 * BLOCK_BYTES + 11)
    digester = Digester()
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        digester.update(data[begin:end])
    assert digester.value() == digest_bytes(data)
    assert digester.value() == digest_bytes(data), "asking must not change the answer"


def test_pairs_of_top_bit_flips_are_seen():
    lanes = random_lanes(2 * BLOCK_LANES)
    before = digest_bytes(lanes)
    pairs = np.random.default_rng(2).integers(0, len(lanes), (60, 2))
    pairs[:20, 1] = (pairs[:20, 0] + BLOCK_LANES) % len(lanes)
    for i, j in pairs:
        if i == j:
            continue
        flipped = lanes.copy()
        flipped[[i, j]] ^= np.uint64(1 << 63)
        assert digest_bytes(flipped) != before


def test_each_single_bit_is_seen():
    lanes = random_lanes(9)
    values = {digest_bytes(lanes)}
    for bit in range(9 * 64):
        flipped = lanes.copy()
        flipped[bit // 64] ^= np.uint64(1 << bit % 64)
        values.add(digest_bytes(flipped))
    assert len(values) == 9 * 64 + 1


def test_swapped_lanes_are_seen():
    lanes = random_lanes(2 * BLOCK_LANES)
    before = digest_bytes(lanes)
    pairs = np.random.default_rng(3).integers(0, len(lanes), (30, 2))
    pairs[:10, 1] = (pairs[:10, 0] + BLOCK_LANES) % len(lanes)
    for i, j in pairs:
        swapped = lanes.copy()
        swapped[[i, j]] = swapped[[j, i]]
        assert i == j or digest_bytes(swapped) != before


def test_negation_is_seen():
    values = torch.randn(3 * BLOCK_LANES)
    assert digest(-values) != digest(values)
    assert digest(torch.tensor([0.0, 0.0])) != digest(torch.tensor([-0.0, -0.0]))


def test_permuted_rows_are_seen():
    values = torch.randn(8, 64)
    assert digest(values[[1, 0, *range(2, 8)]]) != digest(values)
    assert digest(values.flip(0)) != digest(values)


def test_permuted_blocks_are_seen():
    blocks = random_lanes(4 * BLOCK_LANES).reshape(4, BLOCK_LANES)
    values = {digest_bytes(blocks[list(order)].reshape(-1)) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 2, 3])}
    assert len(values) == 3


def test_length_and_trailing_zeros_are_content():
    values = [digest_bytes(b"abc" + bytes(zeros)) for zeros in range(20)]
    values += [digest_bytes(bytes(zeros)) for zeros in (0, 1, 8, 9, BLOCK_BYTES, BLOCK_BYTES + 1)]
    assert len(set(values)) == len(values)


def test_value_is_an_unsigned_64_bit_number():
    values = [digest_bytes(bytes([value])) for value in range(64)]
    assert all(0 <= value <= MASK for value in values)
    assert any(value > MASK >> 1 for value in values)
