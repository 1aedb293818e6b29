"""A folder to the hub, through `huggingface_hub`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from loopwise.errors import require_extra
from loopwise.hub.auto.card import CARD, is_own_card

log = logging.getLogger(__name__)

ONE_FILE = "1000000GB"
UPLOAD_ARGUMENTS = (
    "commit_message",
    "commit_description",
    "private",
    "token",
    "revision",
    "create_pr",
    "tags",
)


def upload(
    folder: Path,
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    **commit: Any,
) -> str:
    """Make the repository where there is none, and commit the folder; the commit's address.

    A model card as we make them does not replace one on the hub that somebody wrote or edited.
    """
    hub = require_extra("huggingface_hub", "hub", f"uploading to {repo_id!r}")
    api = hub.HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if is_own_card(folder / CARD) and _has_another_card(api, repo_id, commit.get("revision")):
        log.warning(
            "the %s of %s is kept as it is: it is not one that loopwise wrote", CARD, repo_id
        )
        commit["ignore_patterns"] = [CARD]
    return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **commit))


def _has_another_card(api: Any, repo_id: str, revision: str | None) -> bool:
    if not api.file_exists(repo_id, CARD, revision=revision):
        return False
    return not is_own_card(Path(api.hf_hub_download(repo_id, CARD, revision=revision)))
