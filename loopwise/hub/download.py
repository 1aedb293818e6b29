"""A checkpoint on the Hugging Face hub, brought into its local cache; code is never fetched."""

from __future__ import annotations

import re
from pathlib import Path

from loopwise.errors import CheckpointError, require_extra
from loopwise.hub.read import PICKLES

WANTED = ("*.json", "*.safetensors")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def source_folder(source: str, *, allow_pickle: bool = False) -> Path:
    """The folder meant by a path, or by a hub id such as ``ByteDance/Ouro-1.4B``.

    A folder of that name wins over the hub. Downloads are cached by `huggingface_hub`.

    Raises:
        CheckpointError: neither a folder nor a hub id, or the hub does not give it.
        MissingExtraError: `huggingface_hub` is not installed.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(source):
        raise CheckpointError(
            f"no checkpoint folder at {source!r}; check the path, or give a hub id (owner/name)"
        )
    hub = require_extra("huggingface_hub", "hub", f"downloading {source!r}")
    errors = require_extra("huggingface_hub.errors", "hub", f"downloading {source!r}")
    patterns = [*WANTED, *(f"*{ending}" for ending in PICKLES if allow_pickle)]
    try:
        return Path(hub.snapshot_download(source, allow_patterns=patterns))
    except (OSError, ValueError, errors.HfHubHTTPError) as err:
        first = (str(err).strip().splitlines() or [type(err).__name__])[0]
        raise CheckpointError(
            f"cannot get {source!r} from the hub ({first}); check the name and the network, or "
            "give the folder of a copy"
        ) from err
