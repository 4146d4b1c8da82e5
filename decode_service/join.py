"""Joins the engine with the receiving end of the fabric: what a decode worker is made of."""

from __future__ import annotations

from decode_service.settings import DecodeSettings
from decode_service.worker import DecodeLimits, DecodeWorker
from engine.serving.process import MakeRole, RoleContext, RoleWorker, advertised_host
from kernels.wire import select_wire_blocks
from kvtransfer.endpoint import open_endpoint
from kvtransfer.layout import KVLayout
from kvtransfer.receiver import KVReceiver


def layout_of(context: RoleContext, settings: DecodeSettings) -> KVLayout:
    spec = context.host.spec
    return KVLayout(
        spec.num_layers,
        spec.num_kv_heads,
        spec.head_dim,
        settings.block_size,
        settings.dtype,
        context.host.model_digest,
        wire=settings.kv_wire_format,
    )


def make_decode_role(settings: DecodeSettings) -> MakeRole:
    async def make(context: RoleContext) -> RoleWorker:
        cache, wire = context.host.kv_cache, settings.kv_wire_format
        copier = cache if wire == "none" else select_wire_blocks(cache.tensor, wire)
        endpoint = await open_endpoint(
            name=context.name,
            layout=layout_of(context, settings),
            transport=settings.transport,
            host=advertised_host(settings),
            secret=settings.secret_bytes,
            num_slabs=settings.num_slabs,
            slab_bytes=settings.slab_bytes,
            clock=context.clock,
        )
        receiver = KVReceiver(
            worker=context.name,
            layout=endpoint.layout,
            copier=copier,
            plane=endpoint.plane,
            slabs=endpoint.slabs,
            clock=context.clock,
            cluster_secret=settings.secret_bytes,
            settings=endpoint.settings,
            count=context.metrics.fabric_count,
            on_fatal=context.on_fatal,
        )
        host = context.host
        return DecodeWorker(
            submit=host.submit,
            receiver=receiver,
            endpoint=endpoint,
            describe_worker=context.describe,
            on_fault=context.on_fatal,
            clock=context.clock,
            limits=DecodeLimits(
                host.spec.vocab_size, settings.block_size, host.max_sequence_tokens, settings.transfer_deadline_s
            ),
            metrics=context.metrics,
        )

    return make
