"""Which published model a source is, and under which licence: what a model card says of it.

Only what the source itself says; where it says nothing, nothing is said.
"""

from __future__ import annotations

import re
from pathlib import Path

from loopwise.hub.read import Source

# Models that a folder or a GGUF file of that name is a copy of.
KNOWN = tuple(
    f"HuggingFaceTB/SmolLM2-{size}{kind}"
    for size in ("135M", "360M", "1.7B")
    for kind in ("", "-Instruct")
)
_CACHED = re.compile(r"models--(.+?)--(.+)")  # how the hub's cache names a repository
_QUANTISED = re.compile(r"([.-](i?q\d\w*|b?f\d+))?\.gguf$", re.IGNORECASE)
_HEADER = re.compile(r"---\n(.*?)\n---(\n|$)", re.DOTALL)
_LICENSE = re.compile(r"""^license:\s*["']?([\w.+-]+)["']?\s*$""", re.MULTILINE)


def origin_of(source: Source) -> dict[str, str]:
    """``base_model`` and ``license`` of a source, those of them that are known."""
    license = source.license or _license_of(source.folder / "README.md")
    found = {"base_model": _hub_id(source.path.absolute()), "license": license}
    return {name: said for name, said in found.items() if said}


def known_model(name: str) -> str | None:
    """The hub id of a folder or file by its name; None where it is none of KNOWN."""
    plain = _QUANTISED.sub("", name).lower()
    return next((known for known in KNOWN if known.split("/")[1].lower() == plain), None)


def _hub_id(path: Path) -> str | None:
    for above in path.parents:
        cached = _CACHED.fullmatch(above.name)
        if cached and path.relative_to(above).parts[0] == "snapshots":
            return f"{cached[1]}/{cached[2]}"
    return known_model(path.name)


def _license_of(card: Path) -> str | None:
    """As the header of a model card says it."""
    if not card.is_file():
        return None
    header = _HEADER.match(card.read_text(encoding="utf-8", errors="replace"))
    said = _LICENSE.search(header[1]) if header else None
    return said[1] if said else None
