"""The environment that all tests share.

Triton decides when it is first imported whether kernels are compiled or interpreted, so that is settled here, before anything
can import it: interpreted where no GPU is, compiled otherwise. Setting TRITON_INTERPRET from outside decides instead.
"""

import os
from pathlib import Path

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
