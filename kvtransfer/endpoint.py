"""One worker's memory and data plane for KV: what sender and receiver both stand on, opened and closed in the right order.

It must not know roles. The region of slabs is registered before anything connects and unmapped only after the plane has closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.clock import Clock
from kvtransfer.data_plane import DataPlane
from kvtransfer.layout import KVLayout
from kvtransfer.planes.select import open_plane
from kvtransfer.settings import FabricSettings
from kvtransfer.staging import SlabPool


@dataclass(frozen=True, slots=True)
class KVEndpoint:
    layout: KVLayout
    plane: DataPlane
    slabs: SlabPool
    settings: FabricSettings

    async def close(self) -> None:
        """After the sender or receiver that uses it."""
        await self.plane.close()
        self.slabs.close()

    @property
    def unhealthy_reason(self) -> str | None:
        """A read that never ended: its slab is lost until the process is replaced."""
        age_s = self.slabs.quarantine_age_s()
        limit_s = 2 * self.settings.quarantine_s + self.settings.lease_s
        if age_s > limit_s:
            return f"a slab has been in quarantine for {age_s:.1f} s, the limit is {limit_s:.1f} s"
        return None


async def open_endpoint(
    *, name: str, layout: KVLayout, transport: str, host: str, secret: bytes, num_slabs: int, slab_bytes: int, clock: Clock
) -> KVEndpoint:
    """Maps the slabs (each holds at least one block) and starts the plane on them. Raises InvalidRequest or HandoffFailed."""
    blocks_per_slab = max(1, slab_bytes // layout.wire_block_bytes)
    slabs = SlabPool(num_slabs, blocks_per_slab * layout.wire_block_bytes, clock)
    plane = open_plane(transport, name=name, secret=secret, host=host)
    try:
        await plane.start(slabs.region)
    except BaseException:
        slabs.close()
        raise
    return KVEndpoint(layout, plane, slabs, FabricSettings())
