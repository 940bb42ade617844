"""What moving training state off a CUDA device costs, and what a save right before it adds.

    python benchmarks/gpu_offload.py --folder DIR [--gb 4.3] [--width 1024] [--rounds 8]

The same state leaves and comes back in turns: alone, and behind a save of it. An offload is a snapshot, so the second
ought to copy it once, not twice.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from gpu_ckpt import Saving, Training

from headwater.engines.torch.offload import Parking


def offload(training: Training, parking: Parking, saving: Saving | None) -> tuple[float, float, int]:
    """Seconds until the state is on the host, the save's call included, and until it is back; bytes copied for it."""
    tensors = [*training.model.parameters(), *training.model.buffers()]
    tensors += [value for state in training.optimizer.state.values() for value in state.values()]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if saving is not None:
        saving.save()
    copied = parking.park(tensors, training.fence.wait())
    torch.cuda.empty_cache()
    away = time.perf_counter() - begin
    begin = time.perf_counter()
    parking.bring_back()
    return away, time.perf_counter() - begin, copied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=4.3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="of the model: how large its tensors are")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    training, parking = Training(args.gb * 1e9, 8, args.width), Parking("the benchmark's state")
    training.step()
    saving = Saving(training, args.folder / "offload", "wait")
    offload(training, parking, saving)
    offload(training, parking, None)
    times: dict[str, list[float]] = {"alone": [], "behind a save": [], "back": []}
    nbytes = training.nbytes()
    for _ in range(args.rounds):
        training.step()
        saving.manager.wait_committed()
        away, back, copied = offload(training, parking, None)
        assert copied == nbytes + sum(b.numel() * b.element_size() for b in training.model.buffers())
        times["alone"].append(away)
        times["back"].append(back)
        training.step()
        away, back, copied = offload(training, parking, saving)
        assert copied < nbytes / 100, "the save's copy was not used"
        times["behind a save"].append(away)
        times["back"].append(back)
    saving.manager.wait_committed()
    saving.manager.close()
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name}: {1e3 * middle:.1f} ms, {nbytes / middle / 1e9:.1f} GB/s", flush=True)
    more = [b / a - 1 for a, b in zip(times["alone"], times["behind a save"], strict=True)]
    state = f"{nbytes / 1e9:.2f} GB in {len(list(training.chunks()))} tensors"
    print(f"{state}: an offload behind a save takes {100 * statistics.median(more):+.1f} % of one alone")
    assert training.losses[-1] < training.losses[0], "nothing trained"


if __name__ == "__main__":
    main()
