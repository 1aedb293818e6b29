"""A folder to the hub, through `huggingface_hub`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopwise.errors import require_extra

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
    """Make the repository where there is none, and commit the folder; the commit's address."""
    hub = require_extra("huggingface_hub", "hub", f"uploading to {repo_id!r}")
    api = hub.HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **commit))
