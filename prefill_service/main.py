"""Entry point of a prefill worker: `python -m prefill_service.main --model FOLDER --redis-url URL …`."""

from __future__ import annotations

import asyncio
import os
import sys

from common.settings import settings_or_exit
from common.types import Role
from engine.serving.process import prepare_process, run_worker
from kvtransfer.planes.process_exit import exit_process
from prefill_service.join import make_prefill_role
from prefill_service.settings import PrefillSettings


def main() -> None:
    settings = settings_or_exit(PrefillSettings, sys.argv[1:], os.environ, prog="prefill_service")
    prepare_process(settings)
    code = asyncio.run(
        run_worker(Role.PREFILL, settings, make_prefill_role(settings), prefill_tokens_max=settings.prefill_chunk_tokens)
    )
    exit_process(code)


if __name__ == "__main__":
    main()
