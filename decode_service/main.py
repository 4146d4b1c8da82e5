"""Entry point of a decode worker: `python -m decode_service.main --model FOLDER --redis-url URL …`."""

from __future__ import annotations

import asyncio
import os
import sys

from common.settings import settings_or_exit
from common.types import Role
from decode_service.join import make_decode_role
from decode_service.settings import DecodeSettings
from engine.serving.process import prepare_process, run_worker
from kvtransfer.planes.process_exit import exit_process


def main() -> None:
    settings = settings_or_exit(DecodeSettings, sys.argv[1:], os.environ, prog="decode_service")
    prepare_process(settings)
    code = asyncio.run(
        run_worker(
            Role.DECODE,
            settings,
            make_decode_role(settings),
            prefill_tokens_max=settings.token_budget,
            prefill_tokens_beside_max=settings.local_prefill_tokens,
        )
    )
    exit_process(code)


if __name__ == "__main__":
    main()
