"""Memory of an engine that reads many large pictures at once."""

import asyncio
import re
from pathlib import Path

import pytest

from backends.contract import EmbedParts, EmbedReply
from tests.engine.engines import engine_on, load_tiny, run_work

pytest.importorskip("PIL", reason="pictures need the extra `media`")

from PIL import Image

from tests.engine.dual_checkpoints import make_dual
from tests.pictures import encoded, part_of

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# 27 MB of pixels each, 650 MB together.
SIDE, CALLS = 3000, 24
GROWTH_MB_MAX = 300


def status_mb(field: str) -> float:
    """Return a figure of this process, such as its peak memory."""
    found = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.skipif(not RESET.exists(), reason="the peak of a process can be reset on Linux only")
def test_large_pictures_are_not_decoded_all_at_once(minilm: Path, tmp_path: Path) -> None:
    make_dual("clip", minilm, tmp_path / "clip")
    engine = engine_on(load_tiny(tmp_path / "clip"))
    part = part_of(encoded(Image.new("RGB", (SIDE, SIDE), (90, 120, 30)), "JPEG"))

    async def send_all(calls: int) -> None:
        works = (run_work(engine, EmbedParts(((part,),)), EmbedReply) for _ in range(calls))
        await asyncio.gather(*works)

    asyncio.run(send_all(2))
    before = status_mb("VmRSS")
    RESET.write_text("5")
    asyncio.run(send_all(CALLS))

    assert status_mb("VmHWM") - before < GROWTH_MB_MAX
