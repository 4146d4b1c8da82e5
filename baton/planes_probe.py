"""The question that tells which data planes work on this machine, asked in a process of its own by `up` and `doctor`."""

PLANES_PROBE = "import json; from kvtransfer.planes.select import available_planes; print(json.dumps(available_planes()))"
