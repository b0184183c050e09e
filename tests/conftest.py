"""What tests of several files share: the real model, converted once for as long as nothing that converts it changes."""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path

import pytest
from tests.golden_models import SMOLLM2

from dskquant.convert import ConvertOptions, convert

ROOT = Path(__file__).parent.parent
CONVERTER = ROOT / "quant" / "dskquant"
NOT_CONVERTING = ("commands", "calibration", "plain", "comparison.py", "cli.py", "inspection.py", "bits.py")
STORES = ROOT / ".cache" / "stores"
HOUR_S = 3600


@pytest.fixture(scope="session")
def smollm2_store() -> Path:
    """The model store of SmolLM2-135M-Instruct. Tests must not write into it."""
    if not SMOLLM2.exists():
        pytest.fail(f"{SMOLLM2} is missing; `make test` brings it")
    store = STORES / f"smollm2-{_conversion_key()}"
    if not store.exists():
        _forget_old_stores()
        convert(SMOLLM2, store, ConvertOptions(), lambda stage, done, total: None)
    return store


def _forget_old_stores() -> None:
    """Removes those made by other code, unless another run may be using them."""
    for store in STORES.glob("smollm2-*"):
        if time.time() - store.stat().st_mtime > HOUR_S:
            shutil.rmtree(store, ignore_errors=True)


def _conversion_key() -> str:
    """Digest of what the store is made from: the size of the model file, and the code that may convert it."""
    digest = hashlib.sha256(str(SMOLLM2.stat().st_size).encode())
    for path in sorted(CONVERTER.rglob("*.py")):
        if path.relative_to(CONVERTER).parts[0] in NOT_CONVERTING:
            continue
        digest.update(path.relative_to(CONVERTER).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
