"""`torch.distributed.checkpoint` over Headwater's format, usable without the rest of Headwater.

    dcp.save(state_dict, storage_writer=HeadwaterWriter("checkpoints", step=100))
    dcp.load(state_dict, storage_reader=HeadwaterReader("checkpoints"))

See docs/dcp.md.
"""

from headwater.checkpoint.dcp_reader import HeadwaterReader
from headwater.checkpoint.dcp_writer import HeadwaterWriter

__all__ = ["HeadwaterReader", "HeadwaterWriter"]
