"""Python imports this first in every process whose PYTHONPATH names this folder: torch then has a simulated device."""

import sys
import traceback
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[4])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

try:
    from tests.support.simulated import install

    install()
except Exception:
    # Python would only print it, and go on without the device.
    traceback.print_exc()
    raise SystemExit(1) from None
