"""Joins the engine with the sending end of the fabric: what a prefill worker is made of."""

from __future__ import annotations

from engine.serving.process import MakeRole, RoleContext, RoleWorker, advertised_host
from kernels.wire import select_wire_blocks
from kvtransfer.endpoint import open_endpoint
from kvtransfer.layout import KVLayout
from kvtransfer.sender import KVSender
from prefill_service.settings import PrefillSettings
from prefill_service.worker import PrefillLimits, PrefillWorker


def layout_of(context: RoleContext, settings: PrefillSettings) -> KVLayout:
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


def make_prefill_role(settings: PrefillSettings) -> MakeRole:
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
        sender = KVSender(
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
        bound = await sender.start(settings.host, settings.kv_port)
        return PrefillWorker(
            submit=context.host.submit,
            sender=sender,
            endpoint=endpoint,
            kv_address=f"{advertised_host(settings)}:{bound.rpartition(':')[2]}",
            describe_worker=context.describe,
            clock=context.clock,
            limits=PrefillLimits(context.host.spec.vocab_size, context.host.max_sequence_tokens),
            metrics=context.metrics,
        )

    return make
