import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.digest import digest, digest_bytes
from headwater.checkpoint.snapshot import snapshot
from headwater.errors import HeadwaterError


def test_staged_bytes_are_a_copy_of_the_live_tensor():
    live = torch.tensor([1.0, 2.0])
    (staged,) = snapshot([Chunk.whole("w", live)])
    live.add_(1)
    assert staged.data.tobytes() == torch.tensor([1.0, 2.0]).numpy().tobytes()
    assert staged.live_digest == digest(torch.tensor([1.0, 2.0])) == digest_bytes(staged.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_strided_views_are_staged_in_row_major_order(dtype: torch.dtype):
    live = torch.arange(12).reshape(3, 4).to(dtype).T
    (staged,) = snapshot([Chunk.whole("w", live)])
    assert staged.shape == (4, 3)
    assert torch.equal(torch.from_numpy(staged.data).view(dtype).reshape(4, 3).float(), live.float())


def test_live_digest_is_taken_of_all_tensors_before_any_is_copied(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    monkeypatch.setattr("headwater.checkpoint.snapshot.digest", lambda tensor: order.append("digest") or 0)
    monkeypatch.setattr("headwater.checkpoint.snapshot._host_copy", lambda tensor: order.append("copy"))
    snapshot([Chunk.whole("a", torch.ones(1)), Chunk.whole("b", torch.ones(1))])
    assert order == ["digest", "digest", "copy", "copy"]


def test_scalars_and_empty_tensors_are_staged():
    scalar, empty = snapshot([Chunk.whole("s", torch.tensor(3)), Chunk.whole("e", torch.empty(0, 4))])
    assert (scalar.shape, scalar.data.nbytes) == ((), 8)
    assert (empty.shape, empty.data.nbytes) == ((0, 4), 0)


def test_freed_storage_is_refused_by_name():
    weight = torch.ones(8)
    weight.untyped_storage().resize_(0)
    with pytest.raises(HeadwaterError, match=r"layer\.weight has no storage"):
        snapshot([Chunk.whole("layer.weight", weight)])


def test_meta_tensor_is_refused_by_name():
    with pytest.raises(HeadwaterError, match=r"layer\.weight has no storage"):
        snapshot([Chunk.whole("layer.weight", torch.ones(8, device="meta"))])


def test_two_chunks_at_one_place_are_refused():
    with pytest.raises(ValueError, match="given twice"):
        snapshot([Chunk.whole("w", torch.ones(2)), Chunk.whole("w", torch.ones(2))])


@pytest.mark.parametrize(("whole", "offset"), [((4, 4), (3, 0)), ((2, 4), (0, 1)), ((2, 4), (0,)), ((2,), (0, 0))])
def test_box_outside_of_its_global_tensor_is_refused(whole: tuple[int, ...], offset: tuple[int, ...]):
    with pytest.raises(ValueError, match="does not lie in"):
        snapshot([Chunk("w", torch.ones(2, 4), whole, offset)])


def test_dtype_that_the_format_lacks_is_refused():
    with pytest.raises(ValueError, match="complex64"):
        snapshot([Chunk.whole("w", torch.ones(2, dtype=torch.complex64))])
